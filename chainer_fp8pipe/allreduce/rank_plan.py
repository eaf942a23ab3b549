"""One rank's part of a plan, with all that is known before it is run."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .plan import Instruction, Opcode, Plan


class Step(NamedTuple):
    """An action, and what its message is.

    Attributes:
        summed: The message is a partial sum: somebody has added to it.  If
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


def program(plan: Plan, rank: int) -> RankPlan:
    """The part of ``rank``."""
    steps = []
    held: set[int] = set()
    incoming = {peer: iter(_sums_sent(plan, peer, rank)) for peer in {
        action.peer for action in plan.actions(rank)
        if action.kind is Opcode.RECEIVE_PARTIAL}}
    touched: set[int] = set()
    for action in plan.actions(rank):
        blocks = range(action.start, action.stop)
        known = touched.intersection(blocks)
        summed = bool(known)
        if action.kind is Opcode.RECEIVE_PARTIAL:
            summed = next(incoming[action.peer])
            touched.update(blocks)
            held.update(blocks)
        elif action.kind is Opcode.ENCODE:
            touched.difference_update(blocks)
        steps.append(Step(action, summed, not known))
    return RankPlan(tuple(steps), tuple(sorted(held)),
                   rank < plan.workers)


def _sums_sent(plan: Plan, rank: int, peer: int) -> list[bool]:
    """Of each partial sum sent to ``peer``, whether somebody added to it."""
    touched: set[int] = set()
    found = []
    for action in plan.actions(rank):
        blocks = range(action.start, action.stop)
        if action.kind is Opcode.RECEIVE_PARTIAL:
            touched.update(blocks)
        elif action.kind is Opcode.ENCODE:
            touched.difference_update(blocks)
        elif action.kind is Opcode.SEND_PARTIAL and action.peer == peer:
            found.append(bool(touched.intersection(blocks)))
    return found
