"""What stands for CuPy in ``--dry``: kernels compiled for this processor."""
from __future__ import annotations

import importlib
import sys
import time
from typing import Any


class Event:
    """``cupy.cuda.Event``, by the host's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Everything has happened already."""


def cupy_or_stand_in(dry: bool) -> Any:
    """``cupy``; or, for trying things out, a stand-in, from now on."""
    if not dry:
        return importlib.import_module('cupy')
    from tests.codecs import fake_cupy
    modules = fake_cupy.modules()
    cupy = modules['cupy']
    cupy.copyto = lambda out, array: out._array.__setitem__(
        Ellipsis, array._array)
    cupy.cuda.Event = Event
    cupy.cuda.get_elapsed_time = lambda begin, end: 1e3 * (
        end.seconds - begin.seconds)
    sys.modules.update(modules)
    return cupy
