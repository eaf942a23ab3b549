"""A run in a few lines: its result, its cost, and the costliest part."""
# All figures of a run's time have one base: the mean over all ranks and all
# updates of the last start, but its first.  So the parts of an update add up
# to the update.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

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


def verdict(record: RunRecord) -> dict[str, Any]:
    """What came out of a run, as numbers that JSON can hold.

    Returns:
        ``name``; ``final``, losses and accuracies by name (None if not
        finite), and ``averaged``, the readings of which each is the mean;
        ``updates``; ``epochs``; ``seconds`` that were trained, over all
        starts; ``ranks``; ``hosts``; ``starts``, ``died`` and ``endings``;
        ``update``, mean seconds over ranks and updates; ``bytes`` that a rank
        sends in one, means; ``costs``, parts of an update with ``what``,
        ``seconds``, ``share`` and ``remedy``, the longest first;
        ``findings`` and ``remarks``, sentences.  What the record does not
        know is missing.
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
        done += [one.last for one in record.intervals[-1]]
        if end := record.ends.get(len(record.starts) - 1):
            done.append(end.iteration)
        found |= _of_starts(record)
    if done:
        found['updates'] = max(done)
    return {**found, 'findings': [one.text for one in diagnose(record)],
            'remarks': record.remarks}


def _of_starts(record: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        'seconds': record.seconds, 'ranks': record.starts[-1].ranks,
        'hosts': len({*record.hosts.values()}), 'starts': len(record.starts)}
    found['died'], found['endings'] = endings(record)
    if ours := record.intervals[-1]:
        phases = mean_of(ours, [one.phases for one in ours])
        found['update'] = sum(phases.values())
        sent, whole = (mean_of(ours, [
            {codec: both[place] for codec, both in one.sent.items()}
            for one in ours]) for place in (0, 1))
        found['bytes'] = {
            'gradients': sum(sent.values()) - sent.get(TO_STAGES, 0.0),
            'in_float32': sum(whole.values()) - whole.get(TO_STAGES, 0.0),
            'to_stages': sent.get(TO_STAGES, 0.0)}
        found['costs'] = [*_costs(phases, record.starts[-1].options)]
    return found


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


def _costs(phases: Mapping[str, float], options: Mapping[str, str]
           ) -> Iterator[dict[str, Any]]:
    parts, whole = parts_of(phases), sum(phases.values())
    for what in sorted(parts, key=lambda what: -parts[what]):
        yield {'what': what, 'seconds': parts[what],
               'share': parts[what] / whole,
               'remedy': PARTS[what][1] or _faster_exchange(options)}


def parts_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part of an update, without parts that take none."""
    found = {what: sum(phases.get(name, 0.0) for name in names)
             for what, (names, _) in PARTS.items()}
    return {what: value for what, value in found.items() if value}


def _faster_exchange(options: Mapping[str, str]) -> str:
    codec = CODECS.get(options.get('communicator', ''))
    if codec is None or codec.nbytes > 1:
        return "Between hosts 'fp8' sends a quarter of the bytes of float32."
    if options.get('overlap') == 'False':
        return 'With overlap=True gradients travel during the backward pass.'
    return '"plan" times other ways to exchange.'


def endings(record: RunRecord) -> tuple[int, str]:
    """How many starts crashed or were killed, and a sentence about all."""
    last, count = len(record.starts) - 1, len(record.starts)
    died = sum(bool(record.ends[start].error) if start in record.ends
               else start != last for start in range(count))
    unfinished = last not in record.ends
    if count == 1 and unfinished:
        return died, 'One start, which has no end: it runs, or was killed.'
    if count == 1:
        return died, (f'One start, which crashed: {record.ends[last].error}.'
                      if died else 'Nothing died: one start.')
    words = [f'{died} crashed or {"was" if died == 1 else "were"} killed'
             ] * bool(died)
    if unfinished:
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
            ('an update', f'{seconds(found["update"])} (mean over ranks and '
             'updates)'),
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
                          f'{share(cost["share"])} of it. {cost["remedy"]}')
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
