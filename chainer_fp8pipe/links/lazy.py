"""Layers whose parameters get their values where they are used."""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import chainer

from ..chains.ghost import is_ghost
from ..chains.valueless_parameters import deferred, draw_later

_made = itertools.count()


def lazy(factory: Callable, *args: Any, **kwargs: Any) -> Any:
    """A layer of a :class:`Divisible` whose parameters take no memory yet::

        model.append(lazy(L.Linear, 3072, 3072))

    appends the layer ``L.Linear(3072, 3072)``.  Its parameters are drawn by
    the rank that owns the layer, when they are first used, each from a
    generator seeded by the model's seed and the layer's index in the whole
    model: so the values are the same for every cut.

    Args:
        factory: A class or function that makes the layer of the arguments.

    Raises:
        TypeError: ``factory`` cannot be called, is a layer already, or does
            not make one.

    .. admonition:: Example

        >>> import chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible, lazy
        >>> Divisible(lazy(L.Linear, 3, 2))[0].W.shape
        (2, 3)
    """
    if isinstance(factory, chainer.Link):
        kind = type(factory).__name__
        raise TypeError(
            f'lazy takes a class or function that makes a layer, and {kind} '
            f'is a layer already; write lazy({kind}, ...), or use the layer '
            'as it is')
    if not callable(factory):
        raise TypeError('lazy takes a class or function that makes a layer, '
                        f'not {factory!r}')
    # A model gives seeds of its own; elsewhere no two layers are equal.
    with deferred(next(_made)):
        layer = factory(*args, **kwargs)
    if not callable(layer):
        raise TypeError(f'{factory!r} returned {layer!r}, which is not a '
                        'layer')
    return layer


def draw_by_place(layer: chainer.Link, seed: int, number: int) -> None:
    """Seeds a layer's parameters without values by its place in a model.

    Also those that get their shape from the first input: their values must
    not depend on what was drawn before.
    """
    for position, parameter in enumerate(layer.params()):
        array = parameter._data[0]
        if array is None or is_ghost(array):
            draw_later(parameter, seed, seed >> 32, number, position)
