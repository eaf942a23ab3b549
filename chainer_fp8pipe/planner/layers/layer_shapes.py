"""Layers of a ``Divisible``: parameters, and what they share."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from ...links.divisible.divisible import Divisible
from ...links.divisible.lazy import built
from ...links.divisible.shared_parameters import things_used
from ...planning.partition.calls import Parameter
from ...planning.partition.partition_plan import PartitionPlan


def layer_shapes(model: Divisible, planned: Mapping[str, Any]
                 ) -> dict[str, Any]:
    """Shapes of parameters by path; builds nothing.

    Args:
        model: A whole one.
        planned: What a plan says, for the layers that are not built.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for number, slot in model.numbered_slots():
        if built(slot) is None:
            found.update({name: shape for name, shape in planned.items()
                          if name.startswith(f'/{number}/')})
            continue
        for path, one in named_parameters(built(slot)):
            if id(one) not in seen:
                seen.add(id(one))
                found[f'/{number}{path}'] = (None if one.array is None
                                             else one.shape)
    return found


def layer_counts(cut: PartitionPlan, layers: int) -> list[int]:
    """How many layers each chunk of a plan has.

    Args:
        cut: Of a plan that was made for a ``Divisible``.
        layers: Of the model.

    Raises:
        ValueError: The plan is for another model, or cuts inside of a layer.
    """
    if len(cut.order) != layers:
        raise ValueError(f'the plan is for a model of {len(cut.order)} '
                         f'layers, and this one has {layers}; make the plan '
                         'again')
    if any(position.depth for position in cut.cuts):
        raise ValueError('a Divisible is cut between layers: calls_later '
                         'must be 0 in each cut of the plan')
    ends = [*(position.place for position in cut.cuts), layers]
    return [end - start for start, end in zip([0, *ends], ends,
                                              strict=False)]


def named_parameters(layer: Any) -> list[tuple[str, chainer.Parameter]]:
    """Of a layer, which may be a function and have none."""
    return (list(layer.namedparams()) if isinstance(layer, chainer.Link)
            else [])


def parameter_of(one: chainer.Parameter) -> Parameter:
    """As plans know a parameter."""
    if one.array is not None:
        return Parameter(one.shape, one.array.dtype)
    return Parameter(None, numpy.dtype(chainer.get_dtype(
        getattr(one.initializer, 'dtype', None))))


def shared_things(model: Divisible) -> dict[int, tuple[str, ...]]:
    """By layer, names of what it shares with others, and no cut divides."""
    users: dict[int, set[int]] = {}
    alive = []                  # so that no id is used again
    for number, slot in model.numbered_slots():
        for thing in things_used(slot):
            alive.append(thing)
            users.setdefault(id(thing), set()).add(number)
    found: dict[int, tuple[str, ...]] = {}
    for one, numbers in enumerate(users.values()):
        if len(numbers) > 1:
            for number in numbers:
                found[number] = (*found.get(number, ()), f'shared {one}')
    return found
