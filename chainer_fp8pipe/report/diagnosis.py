"""What makes a run slow: a rank, a link, late data; and who waits for whom."""
# A rank is slow if its own work, that is an update's time without what it may
# wait for others in, takes longer than that of others who do the same.
# Medians of many updates are compared, and a quarter of a rank's own updates
# must not be as fast as others usually are, nor as a quarter of theirs: a
# machine that is now and then busy with something else makes no rank slow.
#
# A link is slow beside the faster of the others, each direction by itself; if
# all links of a host are, the host is named once.  Bandwidth counts by its
# upper quartile and latency by its least, as all else that machines do makes
# both worse.  What a rank waited for is no statistics but follows from the
# events: a message from when it was sent, an exchange from when the last rank
# came to it.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from .events import WAITING, Event, sends_of, split_waits
from .quantities import number
from .record import (
    COMMUNICATION,
    LinkReading,
    RankInterval,
    RunRecord,
    RunStart,
)

#: A rank is slow from so many times the others' work on, in the median of
#: intervals; in four of five intervals a part of that is enough.
_SLOW, _OFTEN, _PART = 1.15, 0.8, 1.05
#: Intervals that are looked at, the newest.
_RECENT = 8
#: Of a step, what waiting for batches may take.
INPUT_SHARE = 0.1

SLOW_RANK, SLOW_STAGE, SLOW_LINK, INPUT = (
    'slow rank', 'slow stage', 'slow link', 'input')


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
    by_interval: dict[int, dict[int, RankInterval]] = defaultdict(dict)
    for interval in record.intervals:
        if interval.start == start.number:
            by_interval[interval.last][interval.rank] = interval
    recent = [by_interval[last] for last in sorted(by_interval)[-_RECENT:]]
    return [*_slow_ranks(start, recent), *_slow_stages(start, recent),
            *_slow_links(start, (
                link for link in record.links
                if link.start == start.number and not link.is_local)),
            *_input(recent)]


# --- ranks -------------------------------------------------------------------

def _slow_ranks(start: RunStart, recent: list[dict[int, RankInterval]]
                ) -> Iterator[Finding]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(start.ranks):
        groups[start.stages[rank] if start.stages else 0].append(rank)
    for ranks in groups.values():
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            figure = _figure(recent, rank, others)
            if figure is not None:
                yield Finding(SLOW_RANK, (rank,), figure, _about_rank(
                    start, recent, rank, others, figure))


def _figure(recent: list[dict[int, RankInterval]], rank: int,
            others: Sequence[int]) -> float | None:
    """How many times as long a rank works as others; None: as usual."""
    ratios, apart, quick = [], [], []
    for interval in recent:
        there = [interval[other].own for other in others if other in interval]
        if rank not in interval or not there:
            continue
        own = interval[rank].own
        usual = float(numpy.median([other.median for other in there]))
        low = float(numpy.median([other.low for other in there]))
        if usual > 0 and low > 0:
            ratios.append(own.median / usual)
            apart.append(own.low / usual)
            quick.append(own.low / low)
    if not ratios or float(numpy.median(ratios)) < _SLOW:
        return None
    if (float(numpy.mean([ratio > _PART for ratio in ratios])) < _OFTEN
            or float(numpy.median(apart)) < _PART
            or float(numpy.median(quick)) < _SLOW):
        return None
    return float(numpy.median(ratios))


def _about_rank(start: RunStart, recent: list[dict[int, RankInterval]],
                rank: int, others: Sequence[int], figure: float) -> str:
    phases, usual = _phases(recent, [rank]), _phases(recent, others)
    more = {name: seconds - usual.get(name, 0.0)
            for name, seconds in phases.items() if name not in COMMUNICATION}
    name = max(more, key=lambda phase: more[phase])
    return (
        f'Rank {rank} on {start.hosts[rank]} is slow: its own work takes '
        f'{figure:.2f} times as long as that of others. Most of it is '
        f'{_said(name)}: {_ms(phases[name])} in place of '
        f'{_ms(usual.get(name, 0.0))} an update.')


def _phases(recent: list[dict[int, RankInterval]], ranks: Sequence[int]
            ) -> dict[str, float]:
    """Medians over intervals and ranks of the mean seconds by phase."""
    found: dict[str, list[float]] = defaultdict(list)
    there = [interval[rank] for interval in recent for rank in ranks
             if rank in interval]
    for one in there:
        for name, seconds in one.phases.items():
            found[name].append(seconds)
    return {name: float(numpy.median(
        [*seconds, *[0.0] * (len(there) - len(seconds))]))
        for name, seconds in found.items()}


def _slow_stages(start: RunStart, recent: list[dict[int, RankInterval]]
                 ) -> Iterator[Finding]:
    """Stages do different work: the longest says how fast the others are."""
    stages = sorted(set(start.stages))
    if len(stages) < 2 or not recent:
        return
    work = {stage: float(numpy.median([
        interval[rank].own.median for interval in recent
        for rank, of in enumerate(start.stages)
        if of == stage and rank in interval] or [0.0])) for stage in stages}
    longest = max(stages, key=lambda stage: work[stage])
    usual = float(numpy.mean([work[stage] for stage in stages
                              if stage != longest]))
    if usual > 0 and work[longest] / usual > 1 / (1 - 2 * INPUT_SHARE):
        ranks = tuple(rank for rank, of in enumerate(start.stages)
                      if of == longest)
        yield Finding(
            SLOW_STAGE, ranks, work[longest] / usual,
            f'Stage {longest} of the pipeline works {_ms(work[longest])} an '
            f'update, {work[longest] / usual:.2f} times as long as the mean '
            'of the others, which wait for it. Cut the model otherwise, or '
            'let a plan cut it.')


# --- links -------------------------------------------------------------------

#: Readings of a direction that are looked at, the newest.
_READINGS = 8
#: A link is slow from so much of others' bandwidth on; where most links of a
#: host are, a part of that is enough for the others.
_SLOW_LINK, _ALSO = 0.6, 0.75
#: Or with so many times their latency, if that is so many seconds more: ranks
#: that share cores answer up to 0.3 ms late, and no link is the cause.
_LATE, _LATER = 3.0, 400e-6

_Pair = tuple[int, int]


def _slow_links(start: RunStart, readings: Iterable[LinkReading]
                ) -> Iterator[Finding]:
    """Hosts whose links are all slow, then single links, by their ranks.

    Each direction is compared with all others.  Nothing if there are fewer
    than three links between hosts, of which none is usual.
    """
    found: dict[_Pair, list[tuple[float, float]]] = defaultdict(list)
    for link in readings:
        found[link.source, link.target].append((link.bandwidth, link.latency))
    if len({frozenset(pair) for pair in found}) < 3:
        return
    # What else machines do makes both worse.
    speeds = {pair: (float(numpy.quantile([one[0] for one in some], 0.75)),
                     min(one[1] for one in some))
              for pair, some in ((pair, some[-_READINGS:])
                                 for pair, some in found.items())}
    figures = _beside_others(speeds)
    left = {pair for pair, figure in figures.items() if figure < _SLOW_LINK}
    for rank in sorted({rank for pair in left for rank in pair}):
        ways = {way: [pair for pair in speeds if pair[end] == rank]
                for end, way in enumerate((' in sending', ' in receiving'))}
        slow = [way for way, pairs in ways.items() if _all_slow(
            [figures[pair] for pair in pairs])]
        if slow:
            pairs = [pair for way in slow for pair in ways[way]]
            left -= {*pairs}
            figure = float(numpy.median([figures[pair] for pair in pairs]))
            yield Finding(SLOW_LINK, (rank,), figure, (
                f'The network of {start.hosts[rank]} (rank {rank}) is slow'
                f'{slow[0] if len(slow) == 1 else ""}: all its links are at '
                f'{figure:.2f} of the speed of others.'))
    for one, other in sorted(left):
        back = (other, one)
        if back in left and other < one:
            continue        # is said of the other direction
        pairs = [(one, other), *([back] if back in left else [])]
        figure = float(numpy.median([figures[pair] for pair in pairs]))
        bandwidth, latency = speeds[min(pairs, key=lambda pair:
                                        figures[pair])]
        from_, to = (('from', 'to') if back in speeds and back not in left
                     else ('between', 'and'))
        yield Finding(SLOW_LINK, (one, other), figure, (
            f'The link {from_} {start.hosts[one]} (rank {one}) {to} '
            f'{start.hosts[other]} (rank {other}) is slow: '
            f'{bandwidth / 1e6:.1f} MB/s and {latency * 1e6:.0f} µs, '
            f'{figure:.2f} of the speed of other links.'))


def _all_slow(figures: Sequence[float]) -> bool:
    return (len(figures) > 1 and max(figures) < _ALSO
            and float(numpy.median(figures)) < _SLOW_LINK)


def _beside_others(speeds: Mapping[_Pair, tuple[float, float]]
                   ) -> dict[_Pair, float]:
    """The speed of each link, of that of the faster others."""
    bandwidths, latencies = numpy.array([*speeds.values()]).T
    most = _quantile_of_others(bandwidths, 0.9)
    least = _quantile_of_others(latencies, 0.1)
    late = (bandwidths >= _SLOW_LINK * most) & (
        latencies > numpy.maximum(_LATE * least, least + _LATER))
    return dict(zip(speeds, numpy.where(
        late, least / latencies, bandwidths / most).tolist(), strict=True))


def _quantile_of_others(values: numpy.ndarray, share: float) -> numpy.ndarray:
    """For each of at least two values a quantile of all the others."""
    order = numpy.argsort(values)
    place = numpy.argsort(order)        # of each value among all
    low = int(share * (len(values) - 2))
    part = share * (len(values) - 2) - low
    ordered = values[order]
    # Behind the missing value, all others come a place earlier.
    below, above = (ordered[at + (at >= place)]
                    for at in (low, min(low + 1, len(values) - 2)))
    return below + part * (above - below)


# --- input -------------------------------------------------------------------

def _input(recent: list[dict[int, RankInterval]]) -> Iterator[Finding]:
    shares: dict[int, list[float]] = defaultdict(list)
    for interval in recent:
        for rank, one in interval.items():
            shares[rank].append(one.phases.get('input', 0.0)
                                / max(one.step.mean, 1e-9))
    medians = {rank: float(numpy.median(found))
               for rank, found in shares.items()}
    if not medians:
        return
    worst = max(medians, key=lambda rank: medians[rank])
    if medians[worst] > INPUT_SHARE:
        yield Finding(
            INPUT, (worst,), medians[worst],
            f'Rank {worst} waits for batches {100 * medians[worst]:.0f} % of '
            'the time: read them ahead, with more workers, or prepare less '
            'of each.')


def link_share(record: RunRecord, start: int) -> float | None:
    """Which share of its links' speed a rank's bytes between nodes need.

    Args:
        record: The record.
        start: Number of the start.

    Returns:
        Of the busiest rank; None: nothing goes between nodes, or no link
        was measured.
    """
    speeds = [link.bandwidth for link in record.links
              if link.start == start and not link.is_local]
    steps = [interval.step.mean for interval in record.intervals
             if interval.start == start]
    sent: dict[int, int] = {}
    for one in record.sent:
        if one.start == start and one.level == 'between nodes':
            sent[one.rank] = one.bytes
    if not speeds or not sent or not steps:
        return None
    return max(sent.values()) / steps[-1] / float(numpy.median(speeds))


def _said(phase: str) -> str:
    return {'input': 'waiting for batches', 'other': 'what has no section',
            'between': 'what passes between updates',
            'update': "the optimizer's update",
            'backward_weight': 'backward for weights'}.get(phase, phase)


def _ms(seconds: float) -> str:
    return f'{number(seconds * 1e3, 3)} ms'


# --- what ranks waited for -------------------------------------------------

_EXCHANGE = 'exchange'


def explain_waits(events: Iterable[Event], stages: Sequence[int] = ()
                  ) -> list[Event]:
    """Parts waiting from work, and says what was waited for.

    A ``'receive'`` becomes ``'wait'`` until its message was sent.  Of an
    ``'exchange'`` the time until the last rank has come to it becomes
    ``'wait'``: the ranks of a group come to their exchanges in one order, and
    none can end before all have come.  Where that does not hold, as with
    exchanges that updates need not wait for, they stay whole.

    Args:
        events: Of all ranks in one update, on one clock, in any order.
        stages: The pipeline stage of each rank, the ranks of which exchange
            with each other; () where all ranks do.

    Returns:
        The events by their start.  ``about`` of a wait says in words what
        was waited for, such as ``'rank 2: backward'``, and ``values`` has the
        rank's number as ``'rank'``.
    """
    events = sorted(events, key=lambda event: (event.start, event.end))
    busy = _busy(events)
    until: dict[Event, tuple[float, int]] = {
        receive: (send.start, send.rank)
        for receive, send in sends_of(events).items()}
    until.update(_last_to_come(events, stages))

    def waiting(event: Event, end: float) -> Event:
        _, rank = until[event]
        return event._replace(
            name=WAITING, end=end, bytes=0,
            about=_reason(busy.get(rank, []), rank, event.start, end),
            values=(('rank', float(rank)),))
    return split_waits(events, {event: time for event, (time, _)
                           in until.items()}, waiting)


def _busy(events: list[Event]) -> dict[int, list[Event]]:
    """By rank, what its main thread does that others may wait for."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if not event.lane and event.end > event.start:
            found.setdefault(event.rank, []).append(event)
    return found


def _last_to_come(events: list[Event], stages: Sequence[int]
                  ) -> dict[Event, tuple[float, int]]:
    """For each exchange, when the last rank came to it, and which one."""
    groups: dict[int, dict[int, list[Event]]] = {}
    for event in events:
        if event.name == _EXCHANGE and not event.lane:
            group = stages[event.rank] if event.rank < len(stages) else 0
            groups.setdefault(group, {}).setdefault(event.rank, []
                                                    ).append(event)
    found = {}
    for ranks in groups.values():
        if len({len(exchanges) for exchanges in ranks.values()}) != 1:
            continue
        for same in zip(*ranks.values(), strict=True):
            last = max(same, key=lambda event: event.start)
            if last.start <= min(event.end for event in same):
                found.update({event: (last.start, last.rank)
                              for event in same})
    return found


def _reason(busy: list[Event], rank: int, start: float, end: float) -> str:
    """What a rank did most from ``start`` to ``end``."""
    seconds: dict[str, float] = {}
    for event in busy:
        shared = min(event.end, end) - max(event.start, start)
        if shared > 0:
            name = event.name + (
                '' if event.micro_batch is None
                else f' of micro-batch {event.micro_batch}')
            seconds[name] = seconds.get(name, 0.0) + shared
    passed = end - start
    idle = passed - sum(seconds.values())
    if not seconds or idle > max(seconds.values()):
        return f'rank {rank}: nothing that was recorded'
    return f'rank {rank}: {max(seconds, key=lambda name: seconds[name])}'
