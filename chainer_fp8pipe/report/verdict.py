"""A run in a few lines: its result, its cost, and the costliest part."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ..codecs import CODECS
from .diagnosis import diagnose
from .quantities import columns, counted, number, seconds, share, size
from .record import PIPELINE, RankInterval, RunRecord

#: The parts of an update: phases, and how to make them shorter.
PARTS = {
    'forward and backward': (
        ('forward', 'recompute', 'backward', 'backward_weight'),
        'More ranks or faster cores shorten them.'),
    'waiting for stages': (
        ('send', 'receive'),
        'More micro-batches shorten it; "plan" finds how many.'),
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


def verdict(record: RunRecord) -> dict[str, Any]:
    """What came out of a run, as numbers that JSON can hold.

    Returns:
        ``name``; ``final``, losses and accuracies by name (None if not
        finite), and ``averaged``, the readings of which each is the mean;
        ``updates``; ``epochs``; ``seconds`` from the first start to the last
        sign of life; ``ranks``; ``hosts``; ``starts``, ``died`` and
        ``endings``; ``update``, seconds, the slowest rank's median; ``bytes``
        that a rank sends in an update, means, and those of float32;
        ``costs``, parts of an update with ``what``, ``seconds``, ``share``
        and ``remedy``, the longest first; ``findings`` and ``remarks``,
        sentences.  What the record does not know is missing.
    """
    found: dict[str, Any] = {'name': record.name, 'final': {}, 'averaged': {}}
    values: dict[str, list[float]] = defaultdict(list)
    for point in record.curves:
        for name, value in point.values.items():
            values[name].append(value)
    for name in sorted(values, key=lambda name: (
            not name.startswith('val'), name)):
        if name.rsplit('/', 1)[-1] in ('loss', 'accuracy'):
            # Of updates there are many readings, which are noisy.
            last = values[name][-max(1, len(values[name]) // 20):]
            mean = fmean(last)
            found['final'][name] = mean if math.isfinite(mean) else None
            found['averaged'][name] = len(last)
    done = [point.iteration for point in record.curves[-1:]]
    if record.curves:
        found['epochs'] = record.curves[-1].epoch
    if record.starts:
        done += [end.iteration for end in record.ends] + [
            one.last for one in record.intervals]
        found |= _of_starts(record)
    if done:
        found['updates'] = max(done)
    return {**found, 'findings': [one.text for one in diagnose(record)],
            'remarks': record.remarks}


def _of_starts(record: RunRecord) -> dict[str, Any]:
    start, began = record.starts[-1], record.starts[0].time
    found: dict[str, Any] = {
        'seconds': max(0.0, *(end.time - began for end in record.ends),
                       record.last_seen - began),
        'ranks': start.ranks, 'hosts': len({*start.hosts}),
        'starts': len(record.starts)}
    found['died'], found['endings'] = endings(record)
    ours = [one for one in record.intervals if one.start == start.number]
    if ours:
        steps: dict[int, float] = {}
        for one in ours:
            steps[one.last] = max(one.step[1], steps.get(one.last, 0.0))
        found['update'] = median(steps.values())
        found['bytes'] = {what: _mean(ours, [sum(
            level[place] for name, level in one.sent.items()
            if (name == PIPELINE) == to_stages) for one in ours])
            for what, place, to_stages in (
                ('gradients', 1, False), ('in_float32', 2, False),
                ('to_stages', 1, True))}
        found['costs'] = [*_costs(mean_phases(ours), start.options)]
    return found


def _mean(intervals: Sequence[RankInterval], values: Sequence[Any]
          ) -> float:
    """Over all updates of intervals."""
    return sum(one.updates * value for one, value in zip(
        intervals, values, strict=True)) / sum(
            one.updates for one in intervals)


def mean_phases(intervals: Sequence[RankInterval], attribute: str = 'phases'
                ) -> dict[str, float]:
    """Mean seconds over all updates of intervals, by phase."""
    found = [getattr(one, attribute) for one in intervals]
    return {name: _mean(intervals, [one.get(name, 0.0) for one in found])
            for name in dict.fromkeys(name for one in found for name in one)}


def parts_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part of an update, without parts that take none."""
    found = {what: sum(phases.get(name, 0.0) for name in names)
             for what, (names, _) in PARTS.items()}
    return {what: value for what, value in found.items() if value}


def _costs(phases: Mapping[str, float], options: Mapping[str, str]
           ) -> Iterator[dict[str, Any]]:
    parts, whole = parts_of(phases), sum(phases.values())
    for what in sorted(parts, key=lambda what: -parts[what]):
        yield {'what': what, 'seconds': parts[what],
               'share': parts[what] / whole,
               'remedy': PARTS[what][1] or _faster_exchange(options)}


def _faster_exchange(options: Mapping[str, str]) -> str:
    codec = CODECS.get(options.get('communicator', ''))
    if codec is None or codec.nbytes > 1:
        return "Between hosts 'fp8' sends a quarter of the bytes of float32."
    if options.get('overlap') == 'False':
        return 'With overlap=True gradients travel during the backward pass.'
    return ('"python -m chainer_fp8pipe plan" measures other ways to '
            'exchange.')


def endings(record: RunRecord) -> tuple[int, str]:
    """How many starts crashed or were killed, and a sentence about all."""
    last, count = record.starts[-1].number, len(record.starts)
    errors = {end.start: end.error for end in record.ends}
    died = sum(bool(errors.get(start.number, start.number != last))
               for start in record.starts)
    if count == 1 and last not in errors:
        return died, 'One start, which has no end: it runs, or was killed.'
    if count == 1:
        return died, (f'One start, which crashed: {errors[last]}.' if died
                      else 'Nothing died: one start.')
    words = [f'{died} crashed or {"was" if died == 1 else "were"} killed'
             ] * bool(died)
    if last not in errors:
        words.append('the last one has no end: it runs, or was killed')
    return died, (f'{count} starts: {"; ".join(words)}.' if words
                  else f'Nothing died: {count} starts.')


# --- in words ----------------------------------------------------------------

def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A verdict in words: what each line is about, and the line."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, value in found['final'].items():
        place, _, quantity = name.rpartition('/')
        count = found['averaged'][name]
        places[place, f' (mean of the last {count} readings)' * (
            count > 1)].append(f'{quantity} {_value(quantity, value)}')
    lines = [(place, ', '.join(texts) + means)
             for (place, means), texts in places.items()]
    if 'updates' in found:
        epochs = found.get('epochs', 0.0)
        lines.append(('training', f'{found["updates"]:,} updates'
                      + (f', {number(epochs, 3)} epoch' + 's' * (epochs != 1))
                      * ('epochs' in found)))
    if 'starts' in found:
        lines += [('time', f'{seconds(found["seconds"])} on '
                   f'{counted(found["ranks"], "rank")} of '
                   f'{counted(found["hosts"], "host")}'),
                  ('starts', found['endings'])]
    if 'update' in found:
        sent = found['bytes']
        lines += [
            ('an update', f'{seconds(found["update"])} (median of the '
             'slowest rank)'),
            ('a rank sends in it', ', '.join([
                f'{size(sent["gradients"])} of gradients (float32: '
                f'{size(sent["in_float32"])})'] * bool(sent['in_float32'])
                + [f'{size(sent["to_stages"])} to stages']
                * bool(sent['to_stages'])) or 'nothing'),
            *_cost_rows(found['costs'])]
    return lines


def _cost_rows(costs: Sequence[Mapping[str, Any]]
               ) -> Iterator[tuple[str, str]]:
    """The longest part, and if it is computing, the next one as well."""
    for label, cost in zip(('costs most', 'costs most beside it'), costs,
                           strict=False):
        if label == 'costs most' or cost['share'] >= _WORTH:
            yield label, (f'{cost["what"]}, {seconds(cost["seconds"])} or '
                          f'{share(cost["share"])} of the mean update. '
                          f'{cost["remedy"]}')
        if cost['what'] != 'forward and backward':
            return


def _value(quantity: str, value: float | None) -> str:
    if value is None:
        return 'not finite'
    return (share(value) if quantity == 'accuracy' and 0 <= value <= 1
            else number(value))


def text(found: Mapping[str, Any]) -> str:
    """A verdict for the terminal, without a line feed at the end."""
    about = columns([(f'  {label}', line) for label, line in rows(found)]
                    ) if rows(found) else []
    return '\n'.join([found['name'], *about, *(
        f'  {sentence}' for sentence in (*found['findings'],
                                         *found['remarks']))])
