"""Finds links and parameters that two layers have in common."""
from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import chainer

from ..chains.placeholder import is_placeholder
from ..pipeline.layers import Layer, layer_name


def check_cut(layers: Iterable[Layer], owner: Callable[[int], Hashable]
              ) -> None:
    """Raises ValueError if two owners' layers have one parameter or array.

    Args:
        layers: All of the model.
        owner: Maps a layer's index to its owner.
    """
    first: dict[int, tuple[int, Any]] = {}
    for index, layer in layers:
        for thing in held(layer):
            other, other_layer = first.setdefault(id(thing), (index, layer))
            if owner(other) != owner(index):
                raise ValueError(
                    f'{layer_name(other, other_layer)} and '
                    f'{layer_name(index, layer)} share the '
                    f'{type(thing).__name__} '
                    f'{getattr(thing, "name", None) or ""}'.rstrip()
                    + '; cut so that both are on one rank, or give one its '
                    'own parameters')


def held(value: Any, whole: chainer.Link | None = None) -> Iterator[Any]:
    """Links, parameters and their arrays that a layer or attribute holds.

    Methods count for their objects, and bound arguments; not closures.
    ``whole`` is not looked into.
    """
    if value is whole:
        return
    if isinstance(value, chainer.Link):
        yield from value.links()
        for parameter in value.params():
            yield from held(parameter)
    elif isinstance(value, chainer.Parameter):
        yield value
        array = value._data[0]
        if array is not None and not is_placeholder(array):
            yield array
    else:
        for item in _items(value):
            yield from held(item, whole)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, types.MethodType):
        # A layer may be a method of the model.
        around = hasattr(type(value.__self__), 'numbered_layers')
        return () if around else (value.__self__,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()
