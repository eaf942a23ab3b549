"""Proves that a plan is an all-reduce, and counts what it sends.

Every rank's actions are carried out on symbols, see :mod:`.contents`.
"""
from __future__ import annotations

import collections
from fractions import Fraction
from typing import NamedTuple

from ...allreduce.plan import Instruction, Opcode, Plan
from ..deadlock import NO_MESSAGE, Deadlock, Effect, runnable_order
from .contents import Contents, PlanError, Value, describe, wrong
from .traffic import NO_TRAFFIC, MessageForm, Traffic, TrafficReport

__all__ = ['PlanError', 'check']

_SENDS = (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT)
_SENT_BY = {Opcode.RECEIVE_PARTIAL: Opcode.SEND_PARTIAL,
            Opcode.RECEIVE_RESULT: Opcode.SEND_RESULT}
_GATHER = (Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT)


def check(plan: Plan) -> TrafficReport:
    """Proves that every worker ends with the mean of all contributions.

    Sends never block, a rank that receives waits, and messages from one rank
    to another do not overtake each other.

    Raises:
        PlanError: One of that is not so.  The message names the rank and
            the action.
    """
    _check_numbers(plan)
    run = _Run(plan)
    try:
        for rank, action in runnable_order(
                [plan.actions(rank) for rank in range(plan.ranks)], _effect):
            run.do(rank, action)
    except Deadlock as error:
        raise PlanError(error.said(f'plan {plan.name!r}', 'waits at',
                                   describe)) from None
    run.check_end()
    return TrafficReport({pair: run.sent[pair] for pair in sorted(run.sent)},
                         max(run.steps))


def _effect(rank: int, action: Instruction) -> Effect:
    """Messages from one rank to another are one channel."""
    if action.kind in _SENDS:
        return Effect(sends=(rank, action.peer))
    if action.kind is Opcode.ENCODE:
        return NO_MESSAGE
    return Effect(awaits=(action.peer, rank))


class _Message(NamedTuple):
    action: Instruction
    values: tuple[Value, ...]
    step: int


class _Run:
    """The state of all ranks.

    Attributes:
        sent: By (source, target), then by form.
        steps: Per rank, messages in the longest chain that it waited for.
    """

    def __init__(self, plan: Plan) -> None:
        self.sent: dict[tuple[int, int], dict[MessageForm, Traffic]] = {}
        self.steps = [0] * plan.ranks
        self._plan = plan
        self._done = [0] * plan.ranks       # actions
        self._contents = [Contents(plan, rank) for rank in range(plan.ranks)]
        self._messages: dict[tuple[int, int], collections.deque[_Message]] = (
            collections.defaultdict(collections.deque))

    def do(self, rank: int, action: Instruction) -> None:
        """Carries out the next action of ``rank``."""
        if action.kind in _SENDS:
            self._send(rank, action)
        elif action.kind is Opcode.ENCODE:
            self._encode(rank, action)
        else:
            self._receive(rank, action)
        self._done[rank] += 1

    def check_end(self) -> None:
        """Nothing is left over, and every worker has everything."""
        for (source, target), messages in self._messages.items():
            for message in messages:
                raise wrong(source, message.action, 'is not received by '
                            f'rank {target}')
        for rank in range(self._plan.workers):
            for block in self._contents[rank].lacking():
                raise PlanError(
                    f'rank {rank}: {Opcode.RECEIVE_RESULT.value!r} (block '
                    f'{block}) is missing, or its {Opcode.ENCODE.value!r}')

    def _send(self, rank: int, action: Instruction) -> None:
        form, values = self._contents[rank].send(action)
        self._messages[rank, action.peer].append(
            _Message(action, values, self.steps[rank] + 1))
        forms = self.sent.setdefault((rank, action.peer), {})
        forms[form] = forms.get(form, NO_TRAFFIC).and_(Traffic(
            1, Fraction(action.stop - action.start, self._plan.blocks)))

    def _receive(self, rank: int, action: Instruction) -> None:
        message = self._messages[action.peer, rank].popleft()
        sent = message.action
        if (sent.kind, sent.start, sent.stop) != (
                _SENT_BY[action.kind], action.start, action.stop):
            raise wrong(rank, action, f'is where rank {action.peer} has '
                        f'{describe(sent)}')
        self.steps[rank] = max(self.steps[rank], message.step)
        contents = self._contents[rank]
        if action.kind is Opcode.RECEIVE_PARTIAL:
            contents.add(action, message.values)
        else:
            contents.receive_result(action, message.values)

    def _encode(self, rank: int, action: Instruction) -> None:
        # Those that come after the reduce-scatter make the results.
        final = self._done[rank] >= len(self._plan.reduce[rank])
        self._contents[rank].encode(action, final)


def _check_numbers(plan: Plan) -> None:
    """Numbers are in their ranges, and actions in their half."""
    for name in 'reduce', 'owned', 'gather':
        parts = len(getattr(plan, name))
        if parts != plan.ranks:
            raise PlanError(f'plan {plan.name!r} has {plan.ranks} ranks but '
                            f'{name!r} of {parts}')
    if not 1 <= plan.workers <= plan.ranks:
        raise PlanError(f'plan {plan.name!r} has {plan.workers} workers '
                        f'among {plan.ranks} ranks')
    for rank in range(plan.ranks):
        for action in plan.reduced(rank):
            _check_action(plan, rank, action, False)
        for action in plan.gather[rank]:
            _check_action(plan, rank, action, True)


def _check_action(plan: Plan, rank: int, action: Instruction,
                  gather: bool) -> None:
    if (action.kind in _GATHER) != gather:
        half = 'all-gather' if gather else 'reduce-scatter'
        raise wrong(rank, action, f'does not belong into the {half}')
    if not 0 <= action.start < action.stop <= plan.blocks:
        raise wrong(rank, action, f'is not within {plan.blocks} blocks')
    if action.kind is Opcode.ENCODE:
        if action.peer < 1:
            raise wrong(rank, action, 'is the mean of nothing')
    elif action.peer == rank or not 0 <= action.peer < plan.ranks:
        raise wrong(rank, action, f'is not with another one of {plan.ranks} '
                    'ranks')
