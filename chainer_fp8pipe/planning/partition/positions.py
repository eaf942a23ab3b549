"""Positions of calls along a model, and the stages that follow from cuts.

A plan serves traces with other sequence lengths, in evaluation and with other
control flow, so a cut cannot be the number of a call.  Instead, the model's
parameters are grouped by link and numbered in the order of first use.  The
*place* of a call is the largest number among the parameters that the call, or
any call it depends on, reads; the *depth* counts the calls on the longest path
to it from the first call at that place.  The position (place, depth) of a call
is greater than the positions of its inputs.  So cuts at positions give each
call of any trace a stage that is not before the stages of its inputs, and a
recurrent network is cut between layers, not between time steps.
"""
from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .calls import Call, Source


class Position(NamedTuple):
    """Where along the model a call is.

    Attributes:
        place: Index of a group in the order of parameters.
        depth: Calls at this place before the call, on the longest path.
    """

    place: int
    depth: int


#: Groups of paths of parameters, in the order of first use.
Order = tuple[tuple[str, ...], ...]


def order_of(calls: Sequence[Call], names: Sequence[str] = ()) -> Order:
    """The groups of parameters that the calls use.

    A link's parameters form one group, whenever in the link they are first
    used: a recurrent layer uses some only from its second step on.

    Args:
        calls: Of a trace.
        names: Paths of all parameters, in the order of the model's links.
            A parameter that no call uses follows the parameter before it in
            this list.
    """
    first: dict[str, tuple[int, ...]] = {}
    for number, call in enumerate(calls):
        for name in call.parameters:
            first.setdefault(name, (*call.path, number))
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, key in first.items():
        groups.setdefault(key, []).append(name)
    found = [sorted(groups[key]) for key in sorted(groups)]
    group_of = {name: group for group in found for name in group}
    for before, name in zip(['', *names], names, strict=False):
        if name not in group_of:
            number = next((index for index, group in enumerate(found)
                           if before in group), -1)
            found.insert(number + 1, [name])
            group_of[name] = found[number + 1]
    return tuple(map(tuple, found))


def positions(calls: Sequence[Call], order: Order) -> list[Position]:
    """The position of every call.

    A call that depends on the batch alone gets the position of the first
    call that uses its result.  Parameters that the order lacks come last.
    """
    place_of = {name: place for place, group in enumerate(order)
                for name in group}
    found: list[Position | None] = []
    for call in calls:
        before = [found[source.call] for source in call.inputs]
        known = [position for position in before if position is not None]
        places = [place_of.get(name, len(order)) for name in call.parameters]
        if not known and not places and call.pinned is None:
            found.append(None)
            continue
        place = max([*places, *(position.place for position in known)],
                    default=0)
        depths = [position.depth for position in known
                  if position.place == place]
        found.append(Position(place, max(depths) + 1 if depths else 0))
    return _with_floating(calls, found, order)


def _with_floating(calls: Sequence[Call], found: list[Position | None],
                   order: Order) -> list[Position]:
    """Fills in the calls that depend on the batch alone."""
    needed: dict[int, Position] = {}
    last = Position(max(len(order) - 1, 0), 1 << 30)
    result = [last] * len(calls)
    for number in reversed(range(len(calls))):
        position = found[number]
        if position is None:
            position = needed.get(number, last)
        result[number] = position
        for source in calls[number].inputs:
            needed[source.call] = min(needed.get(source.call, last), position)
    return result


class Assignment(NamedTuple):
    """Which stage runs which call of a trace, and which values cross.

    Attributes:
        stages: One per call.
        crossing: For each boundary between stages, the values that cross
            there, also on the way from an earlier to a later stage.
        holders: Stages that use a parameter, by its path.
    """

    stages: tuple[int, ...]
    crossing: tuple[tuple[Source, ...], ...]
    holders: dict[str, tuple[int, ...]]


def assign(calls: Sequence[Call], order: Order, cuts: Sequence[Position],
           wanted: Sequence[Source] = (),
           together: Sequence[Sequence[Source]] = (),
           homes: Mapping[int, int] | None = None) -> Assignment:
    """The stages of a trace's calls.

    Args:
        calls: Of the trace.
        order: Of the plan.
        cuts: The first position of each stage but the first one.
        wanted: Values that the last stage must have: the loss.
        together: Groups of values: the last stage that computes a value of a
            group must have all values of the group.
        homes: Stages for some calls, by number, which override the cuts; a
            call with an input on a later stage still runs on that stage.
    """
    place = positions(calls, order)
    homes = homes or {}
    floating = _floating(calls, homes)
    latest = _latest(calls, homes, len(cuts))
    stages: list[int] = []
    for number, call in enumerate(calls):
        stage = min(max(bisect.bisect_right(cuts, place[number]),
                        homes.get(number, 0)), latest[number])
        if call.pinned is not None:
            stage = call.pinned
        stages.append(max([stage] + [
            stages[source.call] for source in call.inputs
            if not floating[source.call]]))
    # Calls that depend on the batch alone run on the first stage that needs
    # them.
    for number in reversed(range(len(calls))):
        for source in calls[number].inputs:
            if floating[source.call]:
                stages[source.call] = min(stages[source.call],
                                          stages[number])
    return Assignment(tuple(stages),
                      _crossing(calls, stages, len(cuts), wanted, together),
                      _holders(calls, stages))


def _latest(calls: Sequence[Call], homes: Mapping[int, int], last: int
            ) -> list[int]:
    """The last stage that each call may be on, because of users' homes."""
    found = [homes.get(number, last) for number in range(len(calls))]
    for number in reversed(range(len(calls))):
        for source in calls[number].inputs:
            found[source.call] = min(found[source.call], found[number])
    return found


def _floating(calls: Sequence[Call], homes: Mapping[int, int]
              ) -> list[bool]:
    """For each call, whether it depends on the batch alone."""
    found: list[bool] = []
    for number, call in enumerate(calls):
        found.append(not call.parameters and call.pinned is None
                     and number not in homes and all(
                         found[source.call] for source in call.inputs))
    return found


def _crossing(calls: Sequence[Call], stages: Sequence[int], boundaries: int,
              wanted: Sequence[Source], together: Sequence[Sequence[Source]]
              ) -> tuple[tuple[Source, ...], ...]:
    until: dict[Source, int] = dict.fromkeys(wanted, boundaries)
    for group in together:
        last = max([stages[source.call] for source in group], default=0)
        for source in group:
            until[source] = max(until.get(source, 0), last)
    for number, call in enumerate(calls):
        for source in call.inputs:
            until[source] = max(until.get(source, 0), stages[number])
    found: list[list[Source]] = [[] for _ in range(boundaries)]
    for source in sorted(until, key=lambda one: (one.call, str(one.output))):
        for boundary in range(stages[source.call], until[source]):
            found[boundary].append(source)
    return tuple(map(tuple, found))


def _holders(calls: Sequence[Call], stages: Sequence[int]
             ) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for call, stage in zip(calls, stages, strict=True):
        for name in call.parameters:
            found.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(users)) for name, users in found.items()}
