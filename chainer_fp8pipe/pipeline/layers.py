"""What layers are called in messages."""
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
    """``'layer 3 (Linear)'``: what every message calls a layer."""
    while isinstance(layer, functools.partial):
        layer = layer.func
    kind = getattr(layer, '__name__', '') or type(layer).__name__
    return f'layer {index} ({kind})'


@contextlib.contextmanager
def blame(name: str, micro_batch: int) -> Iterator[None]:
    """An exception inside becomes a :class:`LayerError` that says where."""
    try:
        yield
    except LayerError:
        raise
    except Exception as error:
        raise LayerError(f'{name}, micro-batch {micro_batch}: '
                         f'{type(error).__name__}: {error}') from error
