"""What makes a run slow: a rank, a stage, late batches."""
# A rank is slow if its own work, an update without COMMUNICATION, takes longer
# than that of others who do the same, in the median of many updates.  So must
# the faster quarter of its updates, or a machine that is now and then busy
# would make a rank slow.  Intervals of ranks end at updates of their own: each
# is compared with those of others that its middle lies in.
#
# What passes between updates is no own work: extensions that write files are
# rank 0's, and the others wait for it in the next exchange.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from .quantities import seconds
from .record import COMMUNICATION, RankInterval, RunRecord

#: A rank is slow if its work is so many times that of others in the median of
#: intervals, and, in this share of the intervals, at least so many times.
_SLOW, _OFTEN, _PART = 1.15, 0.8, 1.05
#: A stage is slow from so many times the others' work on.
_SLOW_STAGE = 1.25
#: Intervals of a rank that are looked at: the newest.
_RECENT = 8
#: Of a step, what waiting for batches may take.
INPUT_SHARE = 0.1

_PHASES = {'input': 'waiting for batches', 'other': 'what has no section',
           'update': "the optimizer's update",
           'backward_weight': 'backward for weights'}

_Intervals = Mapping[int, Sequence[RankInterval]]


class Finding(NamedTuple):
    """Something that makes a run slower than it could be.

    Attributes:
        kind: ``'slow rank'``, ``'slow stage'`` or ``'input'``.
        ranks: Whose it is.
        figure: How many times as long, or which share.
        text: One or two sentences, with the figure.
    """

    kind: str
    ranks: tuple[int, ...]
    figure: float
    text: str


def diagnose(record: RunRecord) -> list[Finding]:
    """What makes the record's last start slow; [] if nothing stands out."""
    found: dict[int, list[RankInterval]] = defaultdict(list)
    for one in record.intervals[-1] if record.intervals else ():
        found[one.rank].append(one)
    recent = {rank: its[-_RECENT:] for rank, its in sorted(found.items())}
    return [*_slow_ranks(record, recent), *_slow_stages(record, recent),
            *_input(recent)]


def _slow_ranks(record: RunRecord, recent: _Intervals) -> Iterator[Finding]:
    for rank, its in recent.items():
        others = [one for other in recent for one in recent[other]
                  if other != rank and record.stages.get(other)
                  == record.stages.get(rank)]
        figure = _times_as_long(its, others)
        if figure is None:
            continue
        mine, usual = _phases(its), _phases(others)
        name = max((name for name in mine
                    if name not in (*COMMUNICATION, 'between')),
                   key=lambda name: mine[name] - usual.get(name, 0.0))
        yield Finding('slow rank', (rank,), figure, (
            f'Rank {rank} on {record.hosts.get(rank, "?")} is slow: its own '
            f'work takes {figure:.2f} times as long as that of others. Most '
            f'of it is {_PHASES.get(name, name)}: {seconds(mine[name])} in '
            f'place of {seconds(usual.get(name, 0.0))} an update.'))


def _times_as_long(its: Sequence[RankInterval],
                   others: Sequence[RankInterval]) -> float | None:
    """How many times as long a rank works as others; None: as usual."""
    found = []
    for one in its:
        there = [other.own for other in others if other.first
                 <= (one.first + one.last) / 2 <= other.last]
        if there:
            quick, usual, _ = numpy.median(there, axis=0)
            found.append([one.own[1] / usual, one.own[0] / usual,
                          one.own[0] / quick])
    if not found:
        return None
    ratio, apart, quick = numpy.median(found, axis=0).tolist()
    often = numpy.mean([one[0] > _PART for one in found])
    return ratio if (ratio >= _SLOW and often >= _OFTEN and apart >= _PART
                     and quick >= _SLOW) else None


def _phases(its: Sequence[RankInterval]) -> dict[str, float]:
    """Medians over intervals of the mean seconds by phase."""
    return {name: float(numpy.median([
        one.phases.get(name, 0.0) for one in its]))
        for name in dict.fromkeys(name for one in its for name in one.phases)}


def _slow_stages(record: RunRecord, recent: _Intervals) -> Iterator[Finding]:
    """The stage whose work is the longest, if it is much more than usual."""
    works: dict[int, list[float]] = defaultdict(list)
    for rank, its in recent.items():
        works[record.stages.get(rank, 0)] += [one.own[1] for one in its]
    work = {stage: float(numpy.median(its)) for stage, its in works.items()}
    longest = max(work, key=lambda stage: work[stage], default=0)
    others = [work[stage] for stage in work if stage != longest]
    if others and work[longest] > _SLOW_STAGE * numpy.mean(others):
        figure = work[longest] / float(numpy.mean(others))
        yield Finding('slow stage', tuple(
            rank for rank, stage in record.stages.items()
            if stage == longest), figure, (
            f'Stage {longest} of the pipeline works {seconds(work[longest])} '
            f'an update, {figure:.2f} times as long as the mean of the '
            'others, which wait for it. Cut the model otherwise, or let '
            'partition() cut it.'))


def _input(recent: _Intervals) -> Iterator[Finding]:
    shares = {rank: float(numpy.median([
        one.phases.get('input', 0.0) / max(one.seconds, 1e-9)
        for one in its])) for rank, its in recent.items()}
    worst = max(shares, key=lambda rank: shares[rank], default=0)
    if shares.get(worst, 0.0) > INPUT_SHARE:
        yield Finding('input', (worst,), shares[worst], (
            f'Rank {worst} waits for batches {100 * shares[worst]:.0f} % of '
            'the time: read them ahead, with more workers, or prepare less '
            'of each.'))
