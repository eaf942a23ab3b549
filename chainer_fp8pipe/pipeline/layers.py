"""Layers in messages: names, the error that names one, what one returns."""
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


def as_tuple(value: Any) -> tuple:
    """A layer's return value as the arguments of the next layer."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def as_variables(value: Any) -> tuple[chainer.Variable, ...]:
    """A layer's return value as variables.

    Raises:
        TypeError: The next layer could not take the value.
    """
    check_returned(value)
    return tuple(map(chainer.as_variable, as_tuple(value)))


def check_returned(value: Any) -> None:
    """Raises TypeError if no layer could take what a layer has returned."""
    for item in as_tuple(value):
        if not isinstance(item, (chainer.Variable,
                                 *chainer.get_array_types())):
            said = 'None' if item is None else f'a {type(item).__name__}'
            raise TypeError(
                f'it returned {said}; a layer returns a variable, an array, '
                'or a tuple of these')
    if isinstance(value, (tuple, list)) and not value:
        raise TypeError('it returned nothing, an empty tuple')
