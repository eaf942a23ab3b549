"""What a rank has of every block while a plan is carried out on symbols.

Contributions are never copied: a rank that has sent a sum has nothing left of
it.  A result that holds every contribution is therefore the only one of its
block, so that all ranks get the same bits; and where it is received nothing
can lie any more that has still to be sent.
"""
from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from fractions import Fraction

from ...allreduce.plan import Instruction, Opcode, Plan
from .traffic import MessageForm

#: What a block holds: by worker, the weight of its contribution.
Value = Mapping[int, Fraction]


class PlanError(ValueError):
    """A plan is no all-reduce; the message names the rank and the action."""


class _Stage(enum.Enum):
    OWN = 'no more than its own contribution'
    SUM = 'a sum'
    SENT = 'sent its sum'
    RESULT = 'the result'


class Contents:
    """What one rank has of each block.

    Every method raises PlanError if the plan asks for what cannot be.

    Args:
        plan: Whose actions are carried out.
        rank: Number of the rank.
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
        """Takes out what an action sends: the form, and a value per block."""
        stages = set(self._stages[action.start:action.stop])
        values = tuple(self._values[action.start:action.stop])
        if action.kind is Opcode.SEND_RESULT:
            if stages != {_Stage.RESULT}:
                raise wrong(self._rank, action, 'comes before the rank has '
                            'the result')
            return MessageForm.RESULT, values
        self._check_there(action)
        if len(stages) > 1:
            raise wrong(self._rank, action, 'has blocks that were added to '
                        'and others that were not')
        self._set(action, _Stage.SENT)
        return (MessageForm.PARTIAL if stages == {_Stage.SUM}
                else MessageForm.CONTRIBUTION), values

    def add(self, action: Instruction, values: Sequence[Value]) -> None:
        """Adds a partial sum that has arrived."""
        for block, value in enumerate(values, action.start):
            if self._stages[block] in (_Stage.SENT, _Stage.RESULT):
                raise wrong(self._rank, action, 'comes when the rank has '
                            f'{self._stages[block].value} of block {block}')
            total = dict(self._values[block])
            for worker, weight in value.items():
                total[worker] = total.get(worker, Fraction(0)) + weight
            self._values[block] = total
        self._set(action, _Stage.SUM)

    def encode(self, action: Instruction, final: bool) -> None:
        """Divides sums by the number of their contributions.

        Args:
            action: With that number as its peer.
            final: The means are the results of the all-reduce.
        """
        self._check_there(action)
        for block in range(action.start, action.stop):
            mean = {worker: weight / action.peer
                    for worker, weight in self._values[block].items()}
            if sum(mean.values()) != 1:
                raise wrong(self._rank, action, 'has '
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
                raise wrong(self._rank, action, 'comes when the rank has the '
                            f'result of block {block} already')
        self._values[action.start:action.stop] = values
        self._set(action, _Stage.RESULT)

    def _check_there(self, action: Instruction) -> None:
        for block in range(action.start, action.stop):
            stage = self._stages[block]
            if stage in (_Stage.SENT, _Stage.RESULT):
                raise wrong(self._rank, action, 'comes when the rank has '
                            f'{stage.value} of block {block}')
            if not self._values[block]:
                raise wrong(self._rank, action, 'comes when the rank has '
                            f'nothing of block {block}')

    def _check_mean(self, action: Instruction, block: int, mean: Value
                   ) -> None:
        wanted = Fraction(1, self._workers)
        for worker in range(self._workers):
            weight = mean.get(worker, Fraction(0))
            if weight != wanted:
                raise wrong(self._rank, action, f'has {weight}, not {wanted},'
                            f" of rank {worker}'s contribution to block "
                            f'{block} in its mean')

    def _set(self, action: Instruction, stage: _Stage) -> None:
        self._stages[action.start:action.stop] = [stage] * (
            action.stop - action.start)


def describe(action: Instruction) -> str:
    """Gives an action in words."""
    blocks = (f'block {action.start}' if action.stop == action.start + 1
              else f'blocks {action.start} to {action.stop - 1}')
    other = (f'of {action.peer} contributions' if action.kind is Opcode.ENCODE
             else f'rank {action.peer}')
    return f'{action.kind.value!r} ({blocks}, {other})'


def wrong(rank: int, action: Instruction, reason: str) -> PlanError:
    """Makes the error about an action of a rank."""
    return PlanError(f'rank {rank}: {describe(action)} {reason}')
