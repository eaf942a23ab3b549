"""What makes a run slow: a rank, a stage, a link, late data."""
# A rank is slow if its own work, an update without COMMUNICATION, takes longer
# than that of others who do the same, in the median of many updates.  So must
# the faster quarter of its updates, or a machine that is now and then busy
# would make a rank slow.
#
# A link is slow beside the fast ones, each direction by itself; a host with
# slow links only is named once.  Bandwidth counts by its upper quartile and
# latency by its least, as all else that machines do makes both worse.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from .quantities import seconds
from .record import (
    COMMUNICATION,
    LinkReading,
    RankInterval,
    RunRecord,
    RunStart,
)

#: A rank is slow if its work is so many times that of others in the median of
#: intervals, and, in this share of the intervals, at least so many times.
_SLOW, _OFTEN, _PART = 1.15, 0.8, 1.05
#: A stage is slow from so many times the others' work on.
_SLOW_STAGE = 1.25
#: A link is slow below this share of others' bandwidth.  A host is slow if
#: most of its links are, and the others are below the second share.
_SLOW_LINK, _ALSO = 0.6, 0.75
#: Or with so many times their latency, if that is so many seconds more: ranks
#: that share cores answer up to 0.3 ms late, and no link is the cause.
_LATE, _LATER = 3.0, 400e-6
#: Intervals, and readings of a link, that are looked at: the newest.
_RECENT = 8
#: Of a step, what waiting for batches may take.
INPUT_SHARE = 0.1

SLOW_RANK, SLOW_STAGE, SLOW_LINK, INPUT = (
    'slow rank', 'slow stage', 'slow link', 'input')

_PHASES = {'input': 'waiting for batches', 'other': 'what has no section',
           'between': 'what passes between updates',
           'update': "the optimizer's update",
           'backward_weight': 'backward for weights'}

#: What ranks did in one interval, by rank.
_Interval = dict[int, RankInterval]


class Finding(NamedTuple):
    """Something that makes a run slower than it could be.

    Attributes:
        kind: ``'slow rank'``, ``'slow stage'``, ``'slow link'`` or
            ``'input'``.
        ranks: The rank; of a link the two, of one that is slow in one
            direction first the one that sends.
        figure: How many times as long, or which share.
        text: One or two sentences, with the figure.
    """

    kind: str
    ranks: tuple[int, ...]
    figure: float
    text: str


def diagnose(record: RunRecord) -> list[Finding]:
    """What makes the record's last start slow; [] if nothing stands out.

    Args:
        record: With several intervals, better; one is enough.
    """
    if not record.starts:
        return []
    start = record.starts[-1]
    by_update: dict[int, _Interval] = defaultdict(dict)
    for interval in record.intervals:
        if interval.start == start.number:
            by_update[interval.last][interval.rank] = interval
    recent = [by_update[last] for last in sorted(by_update)[-_RECENT:]]
    if not recent:
        return [*_slow_links(start, record.links)]
    return [*_slow_ranks(start, recent), *_slow_stages(start, recent),
            *_slow_links(start, record.links), *_input(recent)]


# --- ranks, stages, input ----------------------------------------------------

def _slow_ranks(start: RunStart, recent: list[_Interval]
                ) -> Iterator[Finding]:
    stages = start.stages or (0,) * start.ranks
    for rank, stage in enumerate(stages):
        others = [other for other, its in enumerate(stages)
                  if its == stage and other != rank]
        figure = _times_as_long(recent, rank, others)
        if figure is None:
            continue
        mine, usual = _phases(recent, [rank]), _phases(recent, others)
        name = max((name for name in mine if name not in COMMUNICATION),
                   key=lambda name: mine[name] - usual.get(name, 0.0))
        yield Finding(SLOW_RANK, (rank,), figure, (
            f'Rank {rank} on {start.hosts[rank]} is slow: its own work takes '
            f'{figure:.2f} times as long as that of others. Most of it is '
            f'{_PHASES.get(name, name)}: {seconds(mine[name])} in place of '
            f'{seconds(usual.get(name, 0.0))} an update.'))


def _times_as_long(recent: list[_Interval], rank: int, others: Sequence[int]
                   ) -> float | None:
    """How many times as long a rank works as others; None: as usual."""
    found = []
    for interval in recent:
        there = [interval[other].own for other in others if other in interval]
        if rank in interval and there:
            low, median, _ = interval[rank].own
            quick, usual, _ = numpy.median(there, axis=0)
            if quick > 0:
                found.append((median / usual, low / usual, low / quick))
    if not found:
        return None
    ratio, apart, quick = numpy.median(found, axis=0).tolist()
    often = numpy.mean([one[0] > _PART for one in found])
    return ratio if (ratio >= _SLOW and often >= _OFTEN and apart >= _PART
                     and quick >= _SLOW) else None


def _phases(recent: list[_Interval], ranks: Sequence[int]
            ) -> dict[str, float]:
    """Medians over intervals and ranks of the mean seconds by phase."""
    found = [interval[rank].phases for interval in recent for rank in ranks
             if rank in interval]
    return {name: float(numpy.median([one.get(name, 0.0) for one in found]))
            for name in dict.fromkeys(name for one in found for name in one)}


def _slow_stages(start: RunStart, recent: list[_Interval]
                 ) -> Iterator[Finding]:
    """The stage whose work is the longest, if it is much more than usual."""
    works: dict[int, list[float]] = defaultdict(list)
    for interval in recent:
        for rank, stage in enumerate(start.stages):
            if rank in interval:
                works[stage].append(interval[rank].own[1])
    work = {stage: float(numpy.median(found))
            for stage, found in works.items()}
    longest = max(work, key=lambda stage: work[stage], default=0)
    others = [work[stage] for stage in work if stage != longest]
    usual = float(numpy.mean(others)) if others else 0.0
    if usual > 0 and work[longest] > _SLOW_STAGE * usual:
        figure = work[longest] / usual
        yield Finding(SLOW_STAGE, tuple(
            rank for rank, stage in enumerate(start.stages)
            if stage == longest), figure, (
            f'Stage {longest} of the pipeline works {seconds(work[longest])} '
            f'an update, {figure:.2f} times as long as the mean of the '
            'others, which wait for it. Cut the model otherwise, or let a '
            'plan cut it.'))


def _input(recent: list[_Interval]) -> Iterator[Finding]:
    shares: dict[int, list[float]] = defaultdict(list)
    for interval in recent:
        for rank, one in interval.items():
            shares[rank].append(one.phases.get('input', 0.0)
                                / max(one.seconds, 1e-9))
    figure, worst = max((float(numpy.median(found)), rank)
                        for rank, found in shares.items())
    if figure > INPUT_SHARE:
        yield Finding(INPUT, (worst,), figure, (
            f'Rank {worst} waits for batches {100 * figure:.0f} % of the '
            'time: read them ahead, with more workers, or prepare less of '
            'each.'))


# --- links -------------------------------------------------------------------

_Pair = tuple[int, int]


def link_speeds(readings: Iterable[LinkReading]
                ) -> dict[_Pair, tuple[float, float]]:
    """Bandwidth and latency from rank to rank, of the newest readings."""
    found: dict[_Pair, list[LinkReading]] = defaultdict(list)
    for link in readings:
        found[link.source, link.target].append(link)
    return {pair: (
        float(numpy.quantile([one.bandwidth for one in some[-_RECENT:]],
                             0.75)),
        min(one.latency for one in some[-_RECENT:]))
        for pair, some in found.items()}


def _slow_links(start: RunStart, readings: Iterable[LinkReading]
                ) -> Iterator[Finding]:
    """Hosts whose links are all slow, then single links, by their ranks.

    Nothing if there are fewer than three links, of which none is usual.
    """
    speeds = link_speeds(link for link in readings
                         if link.start == start.number)
    if len({frozenset(pair) for pair in speeds}) < 3:
        return
    figures = _beside_others(speeds)
    left = {pair for pair, figure in figures.items() if figure < _SLOW_LINK}
    for rank in sorted({rank for pair in left for rank in pair}):
        slow = {}
        for end, way in enumerate((' in sending', ' in receiving')):
            pairs = [pair for pair in speeds if pair[end] == rank]
            its = [figures[pair] for pair in pairs]
            if len(its) > 1 and max(its) < _ALSO and (
                    numpy.median(its) < _SLOW_LINK):
                slow[way] = pairs
        if slow:
            pairs = sum(slow.values(), [])
            left -= {*pairs}
            figure = float(numpy.median([figures[pair] for pair in pairs]))
            yield Finding(SLOW_LINK, (rank,), figure, (
                f'The network of {start.hosts[rank]} (rank {rank}) is slow'
                f'{"" if len(slow) == 2 else [*slow][0]}: all its links are '
                f'at {figure:.2f} of the speed of others.'))
    for one, other in sorted(left):
        back = other, one
        both = [(one, other), *([back] if back in left else [])]
        if len(both) == 2 and other < one:
            continue        # is said of the other direction
        figure = float(numpy.median([figures[pair] for pair in both]))
        bandwidth, latency = speeds[min(both, key=lambda pair: figures[pair])]
        begin, to = (('from', 'to') if back in speeds and len(both) == 1
                     else ('between', 'and'))
        yield Finding(SLOW_LINK, (one, other), figure, (
            f'The link {begin} {start.hosts[one]} (rank {one}) {to} '
            f'{start.hosts[other]} (rank {other}) is slow: '
            f'{bandwidth / 1e6:.1f} MB/s and {latency * 1e6:.0f} µs, '
            f'{figure:.2f} of the speed of other links.'))


def _beside_others(speeds: Mapping[_Pair, tuple[float, float]]
                   ) -> dict[_Pair, float]:
    """The speed of each link, of that of the faster ones."""
    bandwidths, latencies = numpy.array([*speeds.values()]).T
    most = numpy.quantile(bandwidths, 0.9)
    least = numpy.quantile(latencies, 0.1)
    late = (bandwidths >= _SLOW_LINK * most) & (
        latencies > max(_LATE * least, least + _LATER))
    return dict(zip(speeds, numpy.where(
        late, least / latencies, bandwidths / most).tolist(), strict=True))
