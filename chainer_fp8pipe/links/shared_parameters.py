"""Finds links and parameters that two layers have in common."""
from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import chainer

from ..chains.placeholder import is_placeholder
from ..pipeline.layers import Layer, layer_name


def check_cut(layers: Iterable[Layer], owner: Callable[[int], Hashable]
              ) -> None:
    """Raises ValueError if two owners' layers use one link or parameter.

    Args:
        layers: All of the model.
        owner: Maps a layer's index to its owner.
    """
    first: dict[int, tuple[int, Any]] = {}
    for index, layer in layers:
        for thing in things_used(layer):
            other, other_layer = first.setdefault(id(thing), (index, layer))
            if owner(other) != owner(index):
                raise ValueError(
                    f'{layer_name(other, other_layer)} and '
                    f'{layer_name(index, layer)} share {_said(thing)}; cut '
                    'so that both are on one rank, or give one its own '
                    'parameters')


def things_used(layer: Any, model: chainer.Link | None = None) -> list[Any]:
    """Links, parameters and their arrays in a layer.

    Those of its own and, as far as can be seen, those that a function finds
    in its closure, its defaults, its bound arguments, its object or by name
    in its module.  Not looked into are ``model`` and any model whose layer
    this is, as a function may refer to them.
    """
    found: list[Any] = []
    # Keeps things alive, as the id of a freed one may be used again.
    waiting = [layer]
    seen = {id(model)}
    for item in waiting:
        if id(item) in seen or item is not layer and _is_around(item, layer):
            continue
        seen.add(id(item))
        if isinstance(item, (chainer.Link, chainer.Parameter)):
            found.append(item)
        if isinstance(item, chainer.Parameter):
            array = item._data[0]
            if array is not None and not is_placeholder(array):
                found.append(array)
        waiting.extend(_inside(item))
    return found


def _is_around(item: Any, layer: Any) -> bool:
    return hasattr(type(item), 'numbered_layers') and any(
        one is layer for _, one in item.numbered_layers())


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, chainer.Link):
        yield from (vars(item)[name] for name in sorted(item._params))
        if hasattr(type(item), 'numbered_layers'):
            yield from (layer for _, layer in item.numbered_layers())
        else:           # a Sequential has functions, which are no children
            yield from (item if isinstance(item, chainer.Sequential)
                        else item.children())
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from (item.__defaults__, item.__kwdefaults__)
        yield from _free_variables(item)
    elif isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, (tuple, list, set, frozenset)):
        yield from item
    elif callable(item) and not isinstance(item, type):
        yield from getattr(item, '__dict__', {}).values()
        yield type(item).__call__


def _free_variables(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # A variable may have no value yet.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (chainer.Link, chainer.Parameter)):
            yield value


def _said(thing: Any) -> str:
    if isinstance(thing, chainer.Parameter):
        return f'the parameter {thing.name or ""}'.rstrip()
    if isinstance(thing, chainer.Link):
        return f'the link {type(thing).__name__}'
    return f'an array of parameters {thing.shape}'
