"""Says in what measured steps differ from the predicted one, and why."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy

from ...planning.job.job_plan import JobPlan
from .step_parts import EXCHANGE, OTHER, PARTS, PASSES, STAGES, UPDATE

#: A rank that computes for so many times as long as the median is named.
_SLOW = 1.5
#: Parts of less than this share of a step are not shown.
_SHOWN = 0.005

_AGAIN = 'make the plan again'
_LONGER = {
    PASSES: 'Other programs may use the cores of the ranks: end them. Or '
            f'model and batch are not those of the plan: {_AGAIN}.',
    STAGES: 'A stage is slower than when the plan was made, by another '
            'program on its host, or messages between stages are: end the '
            f'program, or {_AGAIN}.',
    EXCHANGE: 'A link is slower than when the plan was made, or ranks come '
              'late: "python -m chainer_fp8pipe bench allreduce" measures '
              f'the exchange; if the link stays slow, {_AGAIN}.',
    UPDATE: 'Optimizer or hooks are not those of the plan: '
            f'{_AGAIN}, with plan(..., optimizer=...).',
    OTHER: 'Batches are read, extensions work, and ranks wait for each '
           'other before and after a step, the longer the more other '
           'programs run: end these, read beside the training (chainer.'
           'iterators.MultithreadIterator), call extensions less often.'}
_SHORTER = ('The machine was busier when the plan was made, or model and '
            f'batch were others: {_AGAIN}, as another choice may be faster.')


class _Row(NamedTuple):
    """A part of a step, in seconds."""

    part: str
    measured: float
    predicted: float


def explain(plan: JobPlan, measured: numpy.ndarray,
            actual: Mapping[str, Any]) -> str:
    """What differs, part by part, and what to do about the largest part.

    Args:
        plan: With the prediction.
        measured: Seconds of a step and of each of :data:`.PARTS`, of all
            ranks: float64[ranks, 6].
        actual: How the job is run: values by the names that they have in the
            plan's choice.
    """
    seconds = float(measured[:, 0].max())
    busiest = int(measured[:, 1].argmax())      # which waits for no other
    rows = _rows(plan, measured[busiest, 1:])
    sign = 1 if seconds > plan.seconds else -1
    largest = max(rows, key=lambda row: sign * (row.measured - row.predicted))
    lines = [
        f'a step takes {_ms(seconds)}, '
        f'{100 * abs(seconds / plan.seconds - 1):.0f} % '
        f'{"more" if sign > 0 else "less"} than the predicted '
        f'{_ms(plan.seconds)} (+- {100 * plan.spread:.0f} %). Of rank '
        f'{busiest}, which computes longest:',
        f'  {"":<28}{"measured":>12}{"predicted":>12}',
        *(f'  {row.part:<28}{_ms(row.measured):>12}{_ms(row.predicted):>12}'
          for row in rows
          if max(row.measured, row.predicted) >= _SHOWN * seconds),
        f'The largest difference is {largest.part}, by '
        f'{_ms(abs(largest.measured - largest.predicted))}. '
        + (_remedy(plan, largest.part, measured[:, 1]) if sign > 0
           else _SHORTER)]
    if unlike := _unlike(plan, actual):
        lines.append(f'The plan is for {unlike}: have the plan make '
                     'communicator, grid and partition.')
    return '\n'.join(lines)


def _rows(plan: JobPlan, measured: numpy.ndarray) -> list[_Row]:
    rows = {part: _Row(part, float(seconds), plan.parts.get(part, 0.0))
            for part, seconds in zip(PARTS, measured, strict=True)}
    if plan.choice.overlap == 'next_forward':
        # Each parameter is updated when the forward pass comes to it.
        passes, update = rows[PASSES], rows.pop(UPDATE)
        rows[PASSES] = _Row(f'{PASSES}, {UPDATE}',
                            passes.measured + update.measured,
                            passes.predicted + update.predicted)
    return list(rows.values())


def _remedy(plan: JobPlan, part: str, passes: numpy.ndarray) -> str:
    """What to do about a part that takes longer than predicted."""
    if not part.startswith(PASSES):
        return _LONGER[part]
    slower = passes.max() / max(float(numpy.median(passes)), 1e-9)
    if plan.choice.stages > 1 or slower < _SLOW:
        return _LONGER[PASSES]
    return (f'Rank {passes.argmax()} computes for {slower:.1f} times as long '
            'as the median rank: another program may use its cores; end it, '
            f'or {_AGAIN}.')


def _unlike(plan: JobPlan, actual: Mapping[str, Any]) -> str:
    """In what the job is not run as planned; '' if in nothing."""
    return ', '.join(
        f'{name}={getattr(plan.choice, name)!r} and this job has {value!r}'
        for name, value in actual.items()
        if getattr(plan.choice, name) != value)


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.4g} ms'
