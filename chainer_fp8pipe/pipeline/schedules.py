"""Schedules of a pipeline as data: what each rank does, in which order.

``stages`` ranks hold ``stages * chunks`` chunks of consecutive layers, chunk
``c`` on rank ``c % stages``.  A batch is cut into ``micro_batches``.  In every
schedule each chunk takes the micro-batches in the order 0, 1, 2, ..., forward
as well as backward, so that sums over micro-batches have the same bits
whatever the schedule.

A rank receives directly before the computation that needs it, and sends
directly after the one that made the message.
"""
from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """What an action does; ``BACKWARD`` is both halves in one."""

    FORWARD = 'forward'
    BACKWARD = 'backward'
    BACKWARD_INPUT = 'backward_input'
    BACKWARD_WEIGHT = 'backward_weight'


class Action(NamedTuple):
    """A computation by one rank."""

    kind: Kind
    micro_batch: int
    chunk: int      # its number in the whole model


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions in their order."""

    name: str
    stages: int
    micro_batches: int
    chunks: int         # of each rank
    actions: tuple[tuple[Action, ...], ...]     # one tuple per rank

    @property
    def last_chunk(self) -> int:
        """The chunk that makes the loss."""
        return self.stages * self.chunks - 1


def gpipe(rank: int, stages: int, micro_batches: int,
          chunks: int) -> list[Action]:
    """All forward passes, then all backward passes.

    With m micro-batches and d stages the idle share is (d - 1) / (m + d - 1),
    and each rank keeps the activations of m micro-batches.

    Source: Huang et al., GPipe, NeurIPS 2019; backward in the order of forward
    as in program 3 of Takisawa, Yazaki, Ishihata, Proposing an Implementation
    Method for Pipeline Parallelism Distributed Deep Learning.
    """
    sizes = rank, stages, micro_batches, chunks
    return _computations(Kind.FORWARD, *sizes) + _computations(
        Kind.BACKWARD, *sizes)


def interleaved(rank: int, stages: int, micro_batches: int,
                chunks: int) -> list[Action]:
    """Forward and backward in turn (1F1B), with one chunk per rank or several.

    With one chunk rank r of d keeps d - r micro-batches at most.  With several
    the pipeline fills in less time: when it is full, forward and backward
    passes take turns, and micro-batches go through a chunk in groups of d or
    some more, so that no rank waits when a group comes round.  With v chunks
    and m >= d the idle share is (d - 1) / (v m + d - 1), for v times as many
    messages and more live activations.

    Sources: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training,
    ICML 2021; Narayanan et al., Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM, SC 2021; there m is a multiple of d and
    all groups are of d.
    """
    sizes = rank, stages, micro_batches, chunks
    forward, backward = (_computations(kind, *sizes)
                         for kind in (Kind.FORWARD, Kind.BACKWARD))
    warm_up = stages - 1 - rank
    if chunks > 1:
        # The first group, which is the largest, goes through all chunks of
        # this rank but the last; then its first micro-batch goes on to the
        # last rank and back.
        warm_up = (2 * warm_up
                   + (chunks - 1) * len(_groups(stages, micro_batches)[0]))
    turns = max(0, len(forward) - warm_up)
    return [*forward[:warm_up],
            *chain(*zip(forward[warm_up:], backward[:turns], strict=True)),
            *backward[turns:]]


def zero_bubble(rank: int, stages: int, micro_batches: int,
                chunks: int) -> list[Action]:
    """:func:`interleaved` with weight halves where a rank would wait.

    Where forward and both halves of backward take the same time and m >= d,
    each rank waits for d - 1 units of 1/v of the length, instead of 3 (d - 1),
    and none keeps more micro-batches than the first one does there.

    Source: schedule ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism,
    2023; there it is for one chunk.
    """
    order: list[Action] = []
    delayed: list[Action] = []
    for action in interleaved(rank, stages, micro_batches, chunks):
        if action.kind is Kind.FORWARD:
            order.append(action)
            continue
        order.append(action._replace(kind=Kind.BACKWARD_INPUT))
        delayed.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        # Rank r has at least r micro-batches fewer in flight than rank 0 and
        # so may keep r for their weight halves.
        if len(delayed) > rank:
            order.append(delayed.pop(0))
    return order + delayed


def _computations(kind: Kind, rank: int, stages: int, micro_batches: int,
                  chunks: int) -> list[Action]:
    """All of one kind; backward the last chunk of a group comes first."""
    own = range(rank, stages * chunks, stages)
    return [Action(kind, micro_batch, chunk)
            for group in _groups(stages, micro_batches)
            for chunk in (own if kind is Kind.FORWARD else reversed(own))
            for micro_batch in group]


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Micro-batches that go through a chunk before the next chunk's turn.

    At least ``stages`` in each, so that the first one has been through all
    ranks when it comes back; all of them if there are fewer than that.
    """
    return [range(*pair) for pair in bounds(
        micro_batches, max(1, micro_batches // stages))]


_ORDERS: dict[str, Callable[..., list[Action]]] = {
    'gpipe': gpipe, '1f1b': interleaved, 'interleaved': interleaved,
    'zero_bubble': zero_bubble,
    'forward': functools.partial(_computations, Kind.FORWARD)}

#: Names of the training schedules.
SCHEDULES = tuple(_ORDERS)[:-1]


@functools.lru_cache(64, typed=True)
def make_schedule(name: str, stages: int, micro_batches: int,
                  chunks: int = 1) -> Schedule:
    """A schedule for training, or for evaluation and prediction.

    Args:
        name: One of :data:`SCHEDULES`, or ``'forward'``: no backward passes.
        stages: Ranks of the pipeline.
        micro_batches: May be fewer than ``stages``.
        chunks: Of each rank; several only with ``interleaved`` and
            ``zero_bubble``.

    Raises:
        ValueError: Saying what is allowed.
    """
    if name not in _ORDERS:
        raise ValueError(f'there is no schedule {name!r}; it must be one of '
                         f'{", ".join(SCHEDULES)}')
    sizes = (at_least_one('stages', stages),
             at_least_one('micro_batches', micro_batches),
             at_least_one('chunks', chunks))
    if sizes[2] > 1 and name in ('gpipe', '1f1b'):
        raise ValueError(f'schedule {name!r} has one chunk per rank, not '
                         f"{chunks}; only 'interleaved' and 'zero_bubble' "
                         'take several')
    return Schedule(name, *sizes, tuple(
        tuple(_ORDERS[name](rank, *sizes)) for rank in range(sizes[0])))


def at_least_one(name: str, value: Any) -> int:
    """A number that a user gives, as an int; it raises ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f'{name} is {value!r}; it must be a whole number of '
                         'at least 1')
    return number


def recomputed(recompute: Any, last: int) -> frozenset[int]:
    """The chunks that keep their inputs only.

    ``recompute`` is a bool, or a tuple with one for each chunk up to number
    ``last``; for anything else it raises ValueError.
    """
    each = ((recompute,) * (last + 1) if isinstance(recompute, bool)
            else recompute)
    if not isinstance(each, tuple) or len(each) != last + 1 or any(
            one not in (True, False) for one in each):
        raise ValueError('recompute must be True, False or a tuple with one '
                         f'of these for each of {last + 1} chunks, not '
                         f'{recompute!r}')
    return frozenset(chunk for chunk, again in enumerate(each) if again)


def bounds(samples: int, micro_batches: int) -> list[tuple[int, int]]:
    """First and last-plus-one sample of every micro-batch.

    Sizes differ by one at most, the longer ones first.
    """
    short, longer = divmod(samples, micro_batches)
    return list(pairwise([number * short + min(number, longer)
                          for number in range(micro_batches + 1)]))
