"""The names of layers in messages, and the error that names one."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

#: A layer of the whole model: its index there, and what is called.
Layer = tuple[int, Callable]


class LayerError(RuntimeError):
    """A layer failed; the message names it, its cause is the exception."""


def layer_name(index: int, layer: Any) -> str:
    """The name of a layer in every message: ``'layer 3 (Linear)'``."""
    while isinstance(layer, functools.partial):
        layer = layer.func
    kind = getattr(layer, '__name__', '') or type(layer).__name__
    return f'layer {index} ({kind})'


@contextlib.contextmanager
def blame(name: str, micro_batch: int) -> Iterator[None]:
    """Turns an exception inside into a :class:`LayerError` with the name."""
    try:
        yield
    except LayerError:
        raise
    except Exception as error:
        raise LayerError(f'{name}, micro-batch {micro_batch}: '
                         f'{type(error).__name__}: {error}') from error
