"""New models of the layers of others."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer import Sequential

from .layer_slots import LayerRange, LayerSlots
from .lazy import Lazy


def slots_of(layers: Iterable[Any]) -> list[Any]:
    """The layers; those of a model are not built."""
    if isinstance(layers, LayerSlots):
        return [slot for _, slot in layers.numbered_slots()]
    return list(layers)


def flat_slots_of(model: Sequential) -> list[Any]:
    """The layers, with those of models inside of it in their place.

    Of the lazy ones, those are built that may turn out to be models.
    """
    flat: list[Any] = []
    for position, slot in enumerate(slots_of(model)):
        if isinstance(slot, Lazy) and _may_make_model(slot.factory):
            slot = model[position]
        flat.extend(flat_slots_of(slot) if isinstance(slot, Sequential)
                    else [slot])
    return flat


def must_be_sequential(other: Any) -> None:
    """Raises ValueError, as Chainer does, if it is not."""
    if not isinstance(other, Sequential):
        raise ValueError('only a chainer.Sequential can be added, not a '
                         f'{type(other).__name__}')


def joined_part(first: Sequential, second: Sequential) -> LayerRange | None:
    """What two models are together: None for a whole model.

    Raises:
        ValueError: One is a part, and the other does not follow on it.
    """
    parts = [model._part for model in (first, second)
             if isinstance(model, LayerSlots) and model._part]
    if not parts:
        return None
    if isinstance(first, LayerSlots) and isinstance(second, LayerSlots) and (
            first.total == second.total and first.seed == second.seed):
        numbers = [number for model in (first, second)
                   for number, _ in model.numbered_slots()]
        start, end = min(numbers, default=0), max(numbers, default=-1) + 1
        if numbers == list(range(start, end)):
            whole = (start, end) == (0, parts[0].total)
            return None if whole else LayerRange(
                parts[0].total, ((start, end),), parts[0].rows)
    raise ValueError(
        f'{first!r} and {second!r} do not follow each other in one model; '
        'for a new model of their layers write Divisible(*first, *second)')


def _may_make_model(factory: Any) -> bool:
    return not isinstance(factory, type) or issubclass(factory, Sequential)
