"""Schedules of a pipeline as data: what each rank does, in which order.

``stages`` ranks hold ``stages * chunks`` chunks of consecutive layers, chunk
``c`` on rank ``c % stages``.  A batch is cut into ``micro_batches``.  In every
schedule each chunk takes the micro-batches in the order 0, 1, 2, ..., forward
as well as backward, so that sums over micro-batches have the same bits
whatever the schedule.

A receive stands directly before the computation that needs it, a send
directly after the one that made the message.  Between chunks on the same rank
(one stage) nothing is sent.
"""
from __future__ import annotations

import operator
from collections.abc import Callable

from . import orders
from .actions import Action, Kind, Schedule, ScheduleError

__all__ = ['SCHEDULES', 'Action', 'Kind', 'Schedule', 'ScheduleError',
           'forward_schedule', 'make_schedule']

_ORDERS = {'gpipe': orders.gpipe, '1f1b': orders.one_forward_one_backward,
           'interleaved': orders.interleaved,
           'zero_bubble': orders.zero_bubble}

#: Names of the training schedules; pictures are in :mod:`~.schedules.orders`.
SCHEDULES = tuple(_ORDERS)


def make_schedule(name: str, stages: int, micro_batches: int,
                  chunks: int = 1) -> Schedule:
    """A schedule for training.

    Args:
        name: One of :data:`SCHEDULES`.
        stages: Ranks of the pipeline, at least 1.
        micro_batches: At least 1; may be fewer than ``stages``.
        chunks: Chunks of each rank; more than 1 only with ``interleaved``
            and ``zero_bubble``.

    Raises:
        ValueError: Saying what is allowed.
    """
    if name not in _ORDERS:
        raise ValueError(f'there is no schedule {name!r}; it must be one of '
                         f'{", ".join(SCHEDULES)}')
    sizes = _sizes(stages, micro_batches, chunks)
    if sizes[2] > 1 and name not in ('interleaved', 'zero_bubble'):
        raise ValueError(f'schedule {name!r} has one chunk per rank, not '
                         f"{chunks}; only 'interleaved' and 'zero_bubble' "
                         'take several')
    return _make(name, _ORDERS[name], *sizes)


def forward_schedule(stages: int, micro_batches: int,
                     chunks: int = 1) -> Schedule:
    """A schedule for evaluation and prediction: no backward passes.

    Args:
        stages: Ranks of the pipeline, at least 1.
        micro_batches: At least 1; may be fewer than ``stages``.
        chunks: Chunks of each rank.

    Raises:
        ValueError: A number is too small.
    """
    return _make('forward', orders.forwards,
                 *_sizes(stages, micro_batches, chunks))


def _sizes(stages: int, micro_batches: int,
           chunks: int) -> tuple[int, int, int]:
    return (_at_least_one('stages', stages),
            _at_least_one('micro_batches', micro_batches),
            _at_least_one('chunks', chunks))


def _at_least_one(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f'{name} is {value!r}; it must be a whole number of '
                         'at least 1')
    return number


def _make(name: str, order: Callable[[int, int, int, int], list[Action]],
          stages: int, micro_batches: int, chunks: int) -> Schedule:
    last = stages * chunks - 1
    return Schedule(name, stages, micro_batches, chunks, tuple(
        tuple(step for action in order(rank, stages, micro_batches, chunks)
              for step in _with_transfers(action, stages, last))
        for rank in range(stages)))


def _with_transfers(action: Action, stages: int, last: int) -> list[Action]:
    """A computation between its receive and its send, where it has them."""
    if stages == 1 or action.kind is Kind.BACKWARD_WEIGHT:
        return [action]
    has_below, has_above = action.chunk > 0, action.chunk < last
    if action.kind is Kind.FORWARD:
        receive = [Kind.RECEIVE_ACTIVATION] * has_below
        send = [Kind.SEND_ACTIVATION] * has_above
    else:
        receive = [Kind.RECEIVE_GRADIENT] * has_above
        send = [Kind.SEND_GRADIENT] * has_below
    return [action._replace(kind=kind)
            for kind in (*receive, action.kind, *send)]
