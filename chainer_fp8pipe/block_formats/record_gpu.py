"""The loops on CuPy arrays; the same functions as the compiled ones.

Kernels run on the current device and stream.  What counts waits for the
device, because it returns an integer.
"""
from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from . import record_kernels


def encode(values: Any, factor: float, residual: Any, records: Any,
           number: int) -> int:
    """As :meth:`.RecordFormat.encode`; ``number`` is the format's."""
    kept = [] if residual is None else [residual]
    launch('encode_feedback' if kept else 'encode_alone', number, values,
           np.float32(factor), *kept, records, np.int64(values.size))
    return _nonfinite(records)


def decode(records: Any, factor: float, out: Any, adds: bool, number: int
           ) -> int:
    """As :meth:`.RecordFormat.decode`; or adds, and does not count."""
    launch('accumulate' if adds else 'decode', number, records,
           np.float32(factor), out, np.int64(out.size))
    return 0 if adds else _nonfinite(records)


def launch(operation: str, number: int, *arguments: Any) -> None:
    """Starts a kernel and does not wait for it.

    Args:
        operation: See :func:`.record_kernels.name`.
        number: Of the format.
        arguments: The kernel's; the last one is the number of elements.
    """
    blocks = record_kernels.blocks(int(arguments[-1]))
    if blocks:
        _compiled(record_kernels.name(operation, number))(
            (blocks,), (record_kernels.THREADS,), arguments)


def _nonfinite(records: Any) -> int:
    return int(cupy.count_nonzero(records[:, -1] == 255))


@functools.cache
def _compiled(name: str) -> cupy.RawKernel:
    return cupy.RawKernel(record_kernels.source(), name,
                          options=record_kernels.OPTIONS)
