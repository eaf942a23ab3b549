"""A run in a few lines: its result, its cost, the costliest part, who is slow.
"""
# All figures of a run's time have one base: the mean over all ranks and all
# updates of the last start, but its first.  So the parts of an update add up
# to the update.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from .quantities import columns, counted, number, seconds, share, size
from .record import COMMUNICATION, RankInterval, RunRecord

#: The parts of an update: phases, and how to make them shorter.
PARTS = {
    'forward and backward': (
        ('forward', 'recompute', 'backward', 'backward_weight'),
        'More ranks or faster cores shorten them.'),
    'waiting for stages': (
        ('send', 'receive'), 'More micro-batches shorten it.'),
    'exchange': (
        ('encode', 'exchange', 'decode'), "Between hosts 'fp8' and 'int4' "
        'send fewer bytes, overlap=True sends them during the backward pass, '
        'and "plan" times the ways to exchange.'),
    'update': (('update',), 'A simpler optimizer shortens it.'),
    'reading batches': (
        ('input',), 'Read batches ahead, with more workers, or prepare less '
        'of each.'),
    'work between updates': (
        ('between',), 'Lengthen the intervals of evaluations, snapshots and '
        'other extensions.'),
    'other': (
        ('other',), 'No section of an update covers it; a profiler shows it.')}
#: What the bytes to other stages are called in a record.
TO_STAGES = 'to stages'

#: The share of an update from which on a part is worth a line.
_LONG = 0.05
#: A rank is slow from so many times the others' work on.
_SLOW = 1.15
#: And if the difference is such a share of an update.
_FELT = 0.1
#: A stage is slow from so many times the others' work on.
_SLOW_STAGE = 1.25
#: Intervals of a rank that are looked at: the newest.
_RECENT = 8


def verdict(record: RunRecord) -> list[tuple[str, str]]:
    """What came out of a run: what each line is about, and the line."""
    lines = [*_result(record)]
    if record.starts:
        lines += [('time', f'{seconds(record.seconds)} on '
                   f'{counted(record.starts[-1].ranks, "rank")} of '
                   f'{counted(len({*record.hosts.values()}), "host")}'),
                  ('starts', _endings(record))]
    if record.intervals:
        lines += _update(record.intervals, record.starts[-1].settings)
    return lines


def text(record: RunRecord) -> str:
    """The verdict for the terminal, without a line feed at the end."""
    lines = [(f'  {label}', line) for label, line in verdict(record)]
    return '\n'.join([record.name, *columns(lines), *(
        f'  {sentence}' for sentence in (
            *diagnose(record), *record.remarks))])


def _result(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The last losses and accuracies, and how long the training was."""
    values: dict[str, list[float]] = defaultdict(list)
    for point in record.curves:
        for name, value in point.values.items():
            if name.rsplit('/', 1)[-1] in ('loss', 'accuracy'):
                values[name].append(value)
    for name in sorted(values, key=lambda name: (
            not name.startswith('val'), name)):
        place, _, quantity = name.rpartition('/')
        # Of updates there are many readings, which are noisy.
        last = values[name][-max(1, len(values[name]) // 20):]
        value = fmean(last)
        yield place, f'{quantity} ' + (
            'not finite' if not math.isfinite(value) else share(value)
            if quantity == 'accuracy' and 0 <= value <= 1 else number(value)
        ) + (f' (mean of the last {len(last)} readings)' * (len(last) > 1))
    done = [one.last for one in record.intervals]
    done += [point.iteration for point in record.curves[-1:]]
    done += [end.iteration for place, end in record.ends.items()
             if place == len(record.starts) - 1]
    if done:
        yield 'training', f'{max(done):,} updates' + ''.join(
            f', {number(point.epoch, 3)} epoch' + 's' * (point.epoch != 1)
            for point in record.curves[-1:])


def _endings(record: RunRecord) -> str:
    """How many starts crashed or were killed."""
    *before, last = map(record.ends.get, range(len(record.starts)))
    died = sum(not end or bool(end.error) for end in before)
    said = [f'{died} crashed or killed'] * bool(died)
    if not last or last.error:
        said.append(f'the last one crashed: {last.error}' if last else
                    'the last one runs, or was killed')
    return (f'{counted(len(before) + 1, "start")}: '
            f'{"; ".join(said) or "nothing died"}.')


def _update(intervals: Sequence[RankInterval], settings: Mapping[str, str]
            ) -> Iterator[tuple[str, str]]:
    """An update's seconds and bytes, and its costliest part."""
    phases = mean_of(intervals, 'phases')
    whole, sent = sum(phases.values()), mean_sent(intervals)
    yield 'an update', f'{seconds(whole)} (mean over ranks and updates)'
    warmup = settings.get('warmup', '')
    is_warm = warmup.isdecimal() and int(warmup) >= min(
        one.first for one in intervals)
    yield 'a rank sends in it', ', '.join(
        f'{size(own)} {TO_STAGES}' if codec == TO_STAGES else
        f'{size(own)} of gradients (float32: {size(float32)}'
        + f', as in the {warmup} updates of warm-up' * is_warm + ')'
        for codec, own, float32 in sent) or 'nothing'
    costs = sorted(((sum(phases[name] for name in names), what)
                    for what, (names, _) in PARTS.items()), reverse=True)
    for label, (cost, what) in zip(('costs most', 'costs most beside it'),
                                   costs, strict=False):
        if cost > _LONG * whole:
            yield label, (f'{what}, {seconds(cost)} or {share(cost / whole)} '
                          f'of it. {PARTS[what][1]}')


def mean_of(intervals: Sequence[RankInterval], field: str
            ) -> dict[str, float]:
    """The mean over all updates of intervals, of a field's parts."""
    found: dict[str, float] = defaultdict(float)
    updates = sum(one.last - one.first + 1 for one in intervals)
    for one in intervals:
        for name, value in getattr(one, field).items():
            found[name] += value * (one.last - one.first + 1) / updates
    return found


def mean_sent(intervals: Sequence[RankInterval]
              ) -> list[tuple[str, float, float]]:
    """Codecs, and mean bytes of an update as sent and in float32."""
    float32 = mean_of(intervals, 'float32')
    return [(codec, own, float32[codec])
            for codec, own in mean_of(intervals, 'sent').items()]


# --- who is slow -------------------------------------------------------------
#
# A rank is slow if its own work, an update without COMMUNICATION, takes longer
# than that of others who do the same, in the median of many updates.  So must
# the faster quarter of its updates, or a machine that is now and then busy
# would make a rank slow.  What passes between updates is no own work:
# extensions that write files are rank 0's.

def diagnose(record: RunRecord) -> list[str]:
    """What makes the record's last start slow; [] if nothing stands out."""
    recent: dict[int, list[RankInterval]] = defaultdict(list)
    for one in sorted(record.intervals, key=lambda one: (one.rank, one.last)):
        recent[one.rank] = [*recent[one.rank], one][-_RECENT:]
    own = {rank: [*map(median, zip(*(one.own for one in its), strict=True))]
           for rank, its in recent.items()}
    found: list[str] = []
    for rank, its in recent.items():
        others = [other for other in recent if other != rank
                  and record.stages.get(other) == record.stages.get(rank)]
        quick, middle = (own[rank][place] / median(
            [own[other][place] for other in others] or [math.inf])
            for place in (0, 1))
        mine, usual = mean_of(its, 'phases'), mean_of([
            one for other in others for one in recent[other]], 'phases')
        if min(quick, middle) < _SLOW or own[rank][1] * (
                1 - 1 / middle) < _FELT * sum(mine.values()):
            continue
        name = max((name for name in mine
                    if name not in (*COMMUNICATION, 'between')),
                   key=lambda name: mine[name] - usual[name])
        found.append(
            f'Rank {rank} on {record.hosts.get(rank, "?")} is slow: its own '
            f'work takes {middle:.2f} times as long as that of others. Most '
            f'of it is {name}: {seconds(mine[name])} in place of '
            f'{seconds(usual[name])} an update.')
    *rest, (longest, stage) = sorted(
        (median(own[rank][1] for rank in own
                if (record.stages.get(rank) or 0) == stage), stage)
        for stage in {record.stages.get(rank) or 0 for rank in own}
        ) or [(0.0, 0)]
    mean = fmean([work for work, _ in rest] or [math.inf])
    if longest > _SLOW_STAGE * mean:
        found.append(
            f'Stage {stage} of the pipeline works {seconds(longest)} an '
            f'update, {longest / mean:.2f} times as long as the mean of the '
            'others, which wait for it. Cut the model otherwise, or let '
            'partition() cut it.')
    return found
