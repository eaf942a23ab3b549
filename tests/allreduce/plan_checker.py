"""Proves that a plan is an all-reduce, and counts what it sends.

Every rank's actions are carried out on symbols.  Contributions are never
copied: a rank that has sent a sum has nothing left of it.  A result with every
contribution is therefore the only one of its block, so that all ranks get the
same bits; and a result that is received never takes the place of something
that has still to be sent.
"""
from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from chainer_fp8pipe.allreduce.plan import Instruction, Opcode, Plan

_SENDS = (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT)
_SENT_BY = {Opcode.RECEIVE_PARTIAL: Opcode.SEND_PARTIAL,
            Opcode.RECEIVE_RESULT: Opcode.SEND_RESULT}
_GATHER = (Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT)

#: What a block holds: by worker, the weight of its contribution.
Value = Mapping[int, Fraction]


class PlanError(ValueError):
    """A plan is no all-reduce; the message names the rank and the action."""


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
    left = [list(plan.actions(rank)) for rank in range(plan.ranks)]
    going = True
    while going:            # as far as anybody can go
        going = False
        for rank, actions in enumerate(left):
            while actions and run.can_do(rank, actions[0]):
                run.do(rank, actions.pop(0))
                going = True
    if any(left):
        raise PlanError(
            f'plan {plan.name!r} comes to a deadlock: ' + ', '.join(
            f'rank {rank} waits at {_describe(actions[0])}'
            for rank, actions in enumerate(left) if actions))
    run.check_end()
    return TrafficReport({pair: run.sent[pair] for pair in sorted(run.sent)},
                         max(run.steps))


class MessageForm(enum.Enum):
    """What a message of an all-reduce carries."""

    CONTRIBUTION = 'contribution'   # of one rank, or of a group, encoded
    PARTIAL = 'partial sum'         # after something was added
    RESULT = 'result'


class Traffic(NamedTuple):
    """Messages, and their elements as a share of the whole vector."""

    messages: int
    elements: Fraction

    def and_(self, other: Traffic) -> Traffic:
        """The messages and elements of both together."""
        return Traffic(self.messages + other.messages,
                       self.elements + other.elements)


NO_TRAFFIC = Traffic(0, Fraction(0))


@dataclass(frozen=True)
class TrafficReport:
    """What a plan sends.

    Attributes:
        pairs: By (source, target), for pairs with messages, then by form.
        steps: Messages in the longest chain in which each one waits for the
            one before: 2 for ``direct``, 2 (P - 1) for a ring.
    """

    pairs: Mapping[tuple[int, int], Mapping[MessageForm, Traffic]]
    steps: int

    def sent(self, rank: int) -> dict[MessageForm, Traffic]:
        """What leaves ``rank``, by form."""
        return _by_form(forms for (source, _), forms in self.pairs.items()
                        if source == rank)

    def received(self, rank: int) -> dict[MessageForm, Traffic]:
        """What reaches ``rank``, by form."""
        return _by_form(forms for (_, target), forms in self.pairs.items()
                        if target == rank)


def _by_form(several: Iterable[Mapping[MessageForm, Traffic]]
             ) -> dict[MessageForm, Traffic]:
    total: dict[MessageForm, Traffic] = {}
    for forms in several:
        for form, traffic in forms.items():
            total[form] = total.get(form, NO_TRAFFIC).and_(traffic)
    return total


class _Stage(enum.Enum):
    OWN = 'no more than its own contribution'
    SUM = 'a sum'
    SENT = 'sent its sum'
    RESULT = 'the result'


class _Contents:
    """What one rank has of each block.

    Every method raises PlanError if its action cannot be carried out.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        own = {rank: Fraction(1)} if rank < plan.workers else {}
        self._rank = rank
        self._workers = plan.workers
        self._values: list[Value] = [own] * plan.blocks
        self._stages = [_Stage.OWN] * plan.blocks

    def lacking(self) -> list[int]:
        """Numbers of the blocks of which the rank has no result."""
        return [block for block, stage in enumerate(self._stages)
                if stage is not _Stage.RESULT]

    def send(self, action: Instruction
            ) -> tuple[MessageForm, tuple[Value, ...]]:
        """Takes out what an action sends: its form, and a value per block."""
        stages = set(self._stages[action.start:action.stop])
        values = tuple(self._values[action.start:action.stop])
        if action.kind is Opcode.SEND_RESULT:
            if stages != {_Stage.RESULT}:
                raise _wrong(self._rank, action, 'comes before the rank has '
                             'the result')
            return MessageForm.RESULT, values
        self._check_there(action)
        if len(stages) > 1:
            raise _wrong(self._rank, action, 'has blocks that were added to '
                         'and others that were not')
        self._set(action, _Stage.SENT)
        return (MessageForm.PARTIAL if stages == {_Stage.SUM}
                else MessageForm.CONTRIBUTION), values

    def add(self, action: Instruction, values: Sequence[Value]) -> None:
        """Adds a partial sum that has arrived."""
        for block, value in zip(self._open(action), values, strict=True):
            total = dict(self._values[block])
            for worker, weight in value.items():
                total[worker] = total.get(worker, Fraction(0)) + weight
            self._values[block] = total
        self._set(action, _Stage.SUM)

    def encode(self, action: Instruction, final: bool) -> None:
        """Divides sums by the number of their contributions, the ``peer``.

        ``final``: the means are the results of the all-reduce.
        """
        self._check_there(action)
        for block in range(action.start, action.stop):
            mean = {worker: weight / action.peer
                    for worker, weight in self._values[block].items()}
            if sum(mean.values()) != 1:
                raise _wrong(self._rank, action, 'has '
                             f'{float(sum(mean.values())) * action.peer:g} '
                             f'contributions to block {block}')
            if final:
                self._check_mean(action, block, mean)
            self._values[block] = mean
        self._set(action, _Stage.RESULT if final else _Stage.OWN)

    def receive_result(self, action: Instruction, values: Sequence[Value]
                      ) -> None:
        """Puts results that have arrived in the place of contributions."""
        for block in range(action.start, action.stop):
            if self._stages[block] is _Stage.RESULT:
                raise _wrong(self._rank, action, 'comes when the rank has the '
                             f'result of block {block} already')
        self._values[action.start:action.stop] = values
        self._set(action, _Stage.RESULT)

    def _open(self, action: Instruction) -> Iterator[int]:
        """The action's blocks, each checked to be neither sent nor done."""
        for block in range(action.start, action.stop):
            stage = self._stages[block]
            if stage in (_Stage.SENT, _Stage.RESULT):
                raise _wrong(self._rank, action, 'comes when the rank has '
                             f'{stage.value} of block {block}')
            yield block

    def _check_there(self, action: Instruction) -> None:
        for block in self._open(action):
            if not self._values[block]:
                raise _wrong(self._rank, action, 'comes when the rank has '
                             f'nothing of block {block}')

    def _check_mean(self, action: Instruction, block: int, mean: Value
                   ) -> None:
        wanted = Fraction(1, self._workers)
        for worker in range(self._workers):
            weight = mean.get(worker, Fraction(0))
            if weight != wanted:
                raise _wrong(self._rank, action, f'has {weight}, not {wanted},'
                             f" of rank {worker}'s contribution to block "
                             f'{block} in its mean')

    def _set(self, action: Instruction, stage: _Stage) -> None:
        self._stages[action.start:action.stop] = [stage] * (
            action.stop - action.start)


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
        self._contents = [_Contents(plan, rank) for rank in range(plan.ranks)]
        self._messages: dict[tuple[int, int], collections.deque[_Message]] = (
            collections.defaultdict(collections.deque))

    def can_do(self, rank: int, action: Instruction) -> bool:
        return (action.kind in _SENDS or action.kind is Opcode.ENCODE
                or bool(self._messages[action.peer, rank]))

    def do(self, rank: int, action: Instruction) -> None:
        if action.kind in _SENDS:
            self._send(rank, action)
        elif action.kind is Opcode.ENCODE:
            # Those that come after the reduce-scatter make the results.
            self._contents[rank].encode(
                action, self._done[rank] >= len(self._plan.reduce[rank]))
        else:
            self._receive(rank, action)
        self._done[rank] += 1

    def check_end(self) -> None:
        """Checks that no message is left, and no worker lacks a result."""
        for (source, target), messages in self._messages.items():
            for message in messages:
                raise _wrong(source, message.action, 'is not received by '
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
            raise _wrong(rank, action, f'is where rank {action.peer} has '
                         f'{_describe(sent)}')
        self.steps[rank] = max(self.steps[rank], message.step)
        contents = self._contents[rank]
        if action.kind is Opcode.RECEIVE_PARTIAL:
            contents.add(action, message.values)
        else:
            contents.receive_result(action, message.values)


def _check_numbers(plan: Plan) -> None:
    """Checks that numbers are in range, and each action in its half."""
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
        raise _wrong(rank, action, f'does not belong into the {half}')
    if not 0 <= action.start < action.stop <= plan.blocks:
        raise _wrong(rank, action, f'is not within {plan.blocks} blocks')
    if action.kind is Opcode.ENCODE:
        if action.peer < 1:
            raise _wrong(rank, action, 'is the mean of nothing')
    elif action.peer == rank or not 0 <= action.peer < plan.ranks:
        raise _wrong(rank, action, f'is not with another one of {plan.ranks} '
                     'ranks')


def _describe(action: Instruction) -> str:
    """An action in words."""
    blocks = (f'block {action.start}' if action.stop == action.start + 1
              else f'blocks {action.start} to {action.stop - 1}')
    other = (f'of {action.peer} contributions' if action.kind is Opcode.ENCODE
             else f'rank {action.peer}')
    return f'{action.kind.value!r} ({blocks}, {other})'


def _wrong(rank: int, action: Instruction, reason: str) -> PlanError:
    return PlanError(f'rank {rank}: {_describe(action)} {reason}')
