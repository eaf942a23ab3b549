"""A run in a few lines: its result, its cost, and the costliest part."""
# All figures of a run's time have one base: the mean over all ranks and all
# updates of the last start, but its first.  So the parts of an update add up
# to the update.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from ..codecs import CODECS
from .diagnosis import diagnose
from .quantities import columns, counted, number, seconds, share, size
from .record import RankInterval, RunRecord

#: The parts of an update: phases, and how to make them shorter.
PARTS = {
    'forward and backward': (
        ('forward', 'recompute', 'backward', 'backward_weight'),
        'More ranks or faster cores shorten them.'),
    'waiting for stages': (
        ('send', 'receive'), 'More micro-batches shorten it.'),
    'exchange': (('encode', 'exchange', 'decode'), ''),
    'update': (('update',), 'A simpler optimizer shortens it.'),
    'reading batches': (
        ('input',), 'Read batches ahead, with more workers.'),
    'work between updates': (
        ('between',), 'Lengthen the intervals of evaluations, snapshots and '
        'other extensions.'),
    'other': (
        ('other',), 'No section of an update covers it; a profiler shows it.')}
#: A cost beside computing is named from this share of an update on.
_WORTH = 0.05
#: What the bytes to other stages are called in a record.
TO_STAGES = 'to stages'


def verdict(record: RunRecord) -> list[tuple[str, str]]:
    """What came out of a run: what each line is about, and the line."""
    lines = [*_result(record)]
    if record.starts:
        lines += [('time', f'{seconds(record.seconds)} on '
                   f'{counted(record.starts[-1].ranks, "rank")} of '
                   f'{counted(len({*record.hosts.values()}), "host")}'),
                  ('starts', _endings(record))]
    if record.starts and (intervals := record.intervals[-1]):
        lines += _update(intervals, record.starts[-1].options)
    return lines


def text(record: RunRecord) -> str:
    """The verdict for the terminal, without a line feed at the end."""
    lines = [(f'  {label}', line) for label, line in verdict(record)]
    return '\n'.join([record.name, *(columns(lines) if lines else ()), *(
        f'  {sentence}' for sentence in (
            *(one.text for one in diagnose(record)), *record.remarks))])


def _result(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The last losses and accuracies, and how long the training was."""
    values: dict[str, list[float]] = defaultdict(list)
    for point in record.curves:
        for name, value in point.values.items():
            if name.rsplit('/', 1)[-1] in ('loss', 'accuracy'):
                values[name].append(value)
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(values, key=lambda name: (
            not name.startswith('val'), name)):
        place, _, quantity = name.rpartition('/')
        # Of updates there are many readings, which are noisy.
        last = values[name][-max(1, len(values[name]) // 20):]
        value = fmean(last)
        places[place, f' (mean of the last {len(last)} readings)' * (
            len(last) > 1)].append(f'{quantity} ' + (
                'not finite' if not math.isfinite(value) else share(value)
                if quantity == 'accuracy' and 0 <= value <= 1
                else number(value)))
    for (place, means), texts in places.items():
        yield place, ', '.join(texts) + means
    done = [point.iteration for point in record.curves[-1:]]
    if record.starts:
        done += [one.last for one in record.intervals[-1]]
        done += [end.iteration for place, end in record.ends.items()
                 if place == len(record.starts) - 1]
    if done:
        yield 'training', f'{max(done):,} updates' + ''.join(
            f', {number(point.epoch, 3)} epoch' + 's' * (point.epoch != 1)
            for point in record.curves[-1:])


def _endings(record: RunRecord) -> str:
    """How many starts crashed or were killed."""
    last, count = len(record.starts) - 1, len(record.starts)
    died = sum(bool(record.ends[start].error) if start in record.ends
               else start != last for start in range(count))
    error = record.ends[last].error if last in record.ends else ''
    what = 'One start' if count == 1 else f'{count} starts'
    found = [f'{died} crashed or {"was" if died == 1 else "were"} killed'
             ] * (died > 0 and count > 1)
    if last not in record.ends:
        found.append('the last one has no end: it runs, or was killed')
    elif error:
        found.append(f'the last one crashed: {error}')
    return (f'{what}: {"; ".join(found)}.' if found
            else f'Nothing died: {what.lower()}.')


def _update(intervals: Sequence[RankInterval], options: Mapping[str, str]
            ) -> Iterator[tuple[str, str]]:
    """An update's seconds and bytes, and its costliest part."""
    phases = mean_of(intervals, [one.phases for one in intervals])
    whole = sum(phases.values())
    yield 'an update', f'{seconds(whole)} (mean over ranks and updates)'
    sent, float32 = mean_sent(intervals)
    stages, _ = sent.pop(TO_STAGES, 0.0), float32.pop(TO_STAGES, 0.0)
    yield 'a rank sends in it', ', '.join([
        f'{size(sum(sent.values()))} of gradients (float32: '
        f'{size(sum(float32.values()))})'] * bool(float32)
        + [f'{size(stages)} to stages'] * bool(stages)) or 'nothing'
    # The longest part, and if it is computing, the next one as well.
    costs = sorted(((sum(phases.get(name, 0.0) for name in names), what)
                    for what, (names, _) in PARTS.items()), reverse=True)
    if costs[0][1] != 'forward and backward':
        del costs[1:]
    for label, (cost, what) in zip(('costs most', 'costs most beside it'),
                                   costs, strict=False):
        if label == 'costs most' or cost >= _WORTH * whole:
            yield label, (
                f'{what}, {seconds(cost)} or {share(cost / whole)} of it. '
                + (PARTS[what][1] or _faster_exchange(options)))


def mean_of(intervals: Sequence[RankInterval],
            values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over all updates of intervals, by name.

    Args:
        intervals: Of one rank or several.
        values: Of each interval, means over its updates.
    """
    updates = sum(one.updates for one in intervals)
    return {name: sum(one.updates * its.get(name, 0.0) for one, its in zip(
        intervals, values, strict=True)) / updates
        for name in dict.fromkeys(name for its in values for name in its)}


def mean_sent(intervals: Sequence[RankInterval]
              ) -> tuple[dict[str, float], dict[str, float]]:
    """Mean bytes of an update by codec, as sent and in float32."""
    sent, float32 = (mean_of(intervals, [
        {codec: both[place] for codec, both in one.sent.items()}
        for one in intervals]) for place in (0, 1))
    return sent, float32


def _faster_exchange(options: Mapping[str, str]) -> str:
    codec = CODECS.get(options.get('communicator', ''))
    if codec is None or codec.nbytes > 1:
        return "Between hosts 'fp8' sends a quarter of the bytes of float32."
    if options.get('overlap') == 'False':
        return 'With overlap=True gradients travel during the backward pass.'
    return '"plan" times other ways to exchange.'
