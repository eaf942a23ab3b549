"""How layers are called in messages, and what they hand to one another."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import chainer

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


def as_tuple(value: Any) -> tuple:
    """What a layer returned, as the arguments of the next one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def as_variables(value: Any) -> tuple[chainer.Variable, ...]:
    """What a layer returned, as variables.

    Raises:
        TypeError: It returned something that the next layer could not take.
    """
    found = []
    for item in as_tuple(value):
        if not isinstance(item, (chainer.Variable,
                                 *chainer.get_array_types())):
            raise TypeError(
                f'it returned {_said(item)}; a layer returns a variable, an '
                'array, or a tuple of these')
        found.append(chainer.as_variable(item))
    if not found:
        raise TypeError('it returned nothing, an empty tuple')
    return tuple(found)


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


def _said(item: Any) -> str:
    return 'None' if item is None else f'a {type(item).__name__}'
