"""Finds links and parameters that two layers have in common."""
from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import chainer

from ..pipeline.layers import Layer, layer_name
from .lazy import Lazy, built


def check_cut(layers: Iterable[Layer],
              owner: Callable[[int], Hashable]) -> None:
    """Raises ValueError if two owners' layers use one link or parameter.

    Args:
        layers: All of the model; none is built.
        owner: Maps a layer's index to its owner.
    """
    first: dict[int, tuple[int, Any]] = {}
    for index, layer in layers:
        for thing in things_used(layer):
            other, other_layer = first.setdefault(id(thing), (index, layer))
            if owner(other) != owner(index):
                raise ValueError(
                    f'{layer_name(other, other_layer)} and '
                    f'{layer_name(index, layer)} share {_said(thing)} and '
                    'cannot be cut apart: each side would train its own '
                    'copy; cut so that both are on one rank, or give one of '
                    'them parameters of its own')


def things_used(layer: Any, model: chainer.Link | None = None) -> list[Any]:
    """Links, unbuilt lazy layers, parameters and their arrays in a layer.

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
        if isinstance(item, (Lazy, chainer.Link, chainer.Parameter)):
            found.append(item)
        if isinstance(item, chainer.Parameter) and item.array is not None:
            found.append(item.array)
        waiting.extend(_inside(item))
    return found


def own_size(slot: Any, seen: set[int],
             size_of: Callable[[Lazy], int | None] = lambda lazy: None
             ) -> int | None:
    """Elements of the parameters that no earlier slot holds; None if unknown.

    Args:
        slot: A layer, or a lazy one that may not be built yet.
        seen: Identities of all that earlier slots use; the slot's are added.
        size_of: The same of a lazy layer that is not built yet.
    """
    # A function may use parameters, but does not hold them.
    if not isinstance(slot, (Lazy, chainer.Link)):
        return 0
    things = [slot] if built(slot) is None else things_used(slot)
    found = [thing for thing in things if id(thing) not in seen
             and (isinstance(thing, chainer.Parameter)
                  or built(thing) is None)]
    seen.update(map(id, things))
    return sum_of_known(size_of(thing) if isinstance(thing, Lazy)
                        else elements(thing) for thing in found)


def elements(parameter: chainer.Parameter) -> int | None:
    """Number of elements; None before the parameter has a shape."""
    return None if parameter.array is None else parameter.array.size


def sum_of_known(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if one of the sizes is not known."""
    sizes = list(sizes)
    return None if None in sizes else sum(filter(None, sizes))


def _is_around(item: Any, layer: Any) -> bool:
    return hasattr(item, 'numbered_slots') and any(
        slot is layer for _, slot in item.numbered_slots())


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, Lazy):
        yield from ((item.factory, item.args, item.kwargs)
                    if item.layer is None else [item.layer])
    elif isinstance(item, chainer.Link):
        yield from (vars(item)[name] for name in sorted(item._params))
        # children() would build lazy layers, and has no functions.
        yield from ((slot for _, slot in item.numbered_slots())
                    if hasattr(item, 'numbered_slots') else item
                    if isinstance(item, chainer.Sequential)
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
        if isinstance(value, (Lazy, chainer.Link, chainer.Parameter)):
            yield value


def _said(thing: Any) -> str:
    if isinstance(thing, chainer.Parameter):
        return f'the parameter {thing.name or ""}'.rstrip()
    if isinstance(thing, Lazy):
        return f'the layer {thing!r}'
    if isinstance(thing, chainer.Link):
        return f'the link {type(thing).__name__}'
    return f'an array of parameters {thing.shape}'
