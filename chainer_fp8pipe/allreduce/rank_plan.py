"""One rank's part of a plan, with all that is known before it is run."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from .plan import Instruction, Opcode, Plan


class Step(NamedTuple):
    """An action, and what its message is.

    Attributes:
        summed: The message is a partial sum of several ranks.  If
            not, it is one rank's contribution or a result.
        fresh: Nothing has been added to these blocks on this rank before.
    """

    action: Instruction
    summed: bool
    fresh: bool


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """The steps of one rank.

    Attributes:
        steps: In their order.
        held: The blocks that this rank adds something to.
        contributes: It has a contribution of its own.
    """

    steps: tuple[Step, ...]
    held: tuple[int, ...]
    contributes: bool


@functools.lru_cache(1024)
def program(plan: Plan, rank: int) -> RankPlan:
    """The part of ``rank``."""
    steps = []
    # By sender, whether each of its messages is a sum.
    incoming = {peer: iter([
        bool(added) for action, added in _with_sums(plan, peer)
        if action.kind is Opcode.SEND_PARTIAL and action.peer == rank])
        for peer in {action.peer for action in plan.actions(rank)
                     if action.kind is Opcode.RECEIVE_PARTIAL}}
    held: set[int] = set()
    for action, added in _with_sums(plan, rank):
        summed = bool(added)
        if action.kind is Opcode.RECEIVE_PARTIAL:
            summed = next(incoming[action.peer])
            held.update(range(action.start, action.stop))
        steps.append(Step(action, summed, not added))
    return RankPlan(tuple(steps), tuple(sorted(held)), rank < plan.workers)


def _with_sums(plan: Plan, rank: int
               ) -> Iterator[tuple[Instruction, set[int]]]:
    """A rank's actions, each with those of its blocks that hold a sum."""
    sums: set[int] = set()
    for action in plan.actions(rank):
        blocks = range(action.start, action.stop)
        yield action, sums.intersection(blocks)
        if action.kind is Opcode.RECEIVE_PARTIAL:
            sums.update(blocks)
        elif action.kind is Opcode.ENCODE:
            sums.difference_update(blocks)
