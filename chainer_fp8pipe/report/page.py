"""One HTML page about runs, which opens from disk without a network."""
# A page is a list of sections.  Each is a question about a run.  A function
# answers piece by piece: sentences, figures, tables.  Tables repeat a figure's
# numbers, for screen readers and without JavaScript.  Text is plain here; the
# template, page.html, escapes it.  The file holds Bokeh, the page's script and
# data; its content security policy allows these scripts, by their hashes, and
# nothing else, so that no name in a run becomes a script.
#
# A page compares several runs in the same figures: a letter stands for each,
# and begins the names of its lines, bars and sentences.
from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import pathlib
import shlex
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy

from .diagnosis import INPUT_SHARE, diagnose, link_speeds
from .events import LANES, WAITING, Event, explain_waits
from .figures import (
    GREY,
    LINE_COLOURS,
    Drawing,
    Table,
    box,
    columns_of,
    draw_bars,
    draw_boxes,
    draw_lines,
)
from .quantities import number, seconds, share, size
from .record import (
    PHASES,
    RankInterval,
    RecordedUpdate,
    RunRecord,
    RunStart,
    TensorHealth,
    written_whole,
)
from .timeline import Look, boxes_of, look_of_name
from .verdict import endings, mean_phases, parts_of, rows, verdict

#: A letter stands for each run on a page.
_LETTERS = string.ascii_uppercase
MOST_RUNS = len(_LETTERS)
#: Behind the name of a setting that differs between runs.
_DIFFERS = ' \u2260'
#: A page holds the timelines of so many updates, and of so many events;
#: further updates are left out.
_MOST_UPDATES, MOST_EVENTS = 12, 60_000
#: A figure has at most so many tensors.
_MOST_TENSORS = 100

#: Quantities that this package reports beside losses: title, unit, factor,
#: and the section that shows them.
_MEASURED = {
    'bytes': ('Bytes of gradients that rank 0 sends', 'kB per update', 1e-3,
              'bytes'),
    'encode': ('Encoding of gradients', 'ms per update', 1.0, 'phases'),
    'exchange': ('Exchange, with waiting for slower ranks', 'ms per update',
                 1.0, 'phases'),
    'decode': ('Decoding of gradients', 'ms per update', 1.0, 'phases'),
    'step_time': ('Time of an update', 'ms', 1e3, 'phases'),
    'predicted_step_time': ('Time of an update, as predicted', 'ms', 1e3,
                            'phases')}

#: Parts of an update that plans have, beside all others.
_PLANNED = ('forward and backward', 'waiting for stages', 'exchange',
            'update')

#: What tensors have readings of: title, unit, factor.
_VALUES = {
    'scale': ('Scale', '', 1.0),
    'q': ('Quantile of |gradient / parameter| that sets the scale', '', 1.0),
    'clipped': ('Elements that were clipped', '% of the tensor', 100.0),
    'residual': ('Norm of the residual (error feedback)', '', 1.0),
    'gradient': ('Norm of the mean gradient', '', 1.0)}

_HERE = pathlib.Path(__file__).parent

#: By the letter that stands for each; '' for a single one.
_Runs = Mapping[str, RunRecord]

#: What an answer is made of: sentences, figures, tables that belong to none.
_Answer = Iterator[str | Drawing | Table]


def write_page(records: Sequence[RunRecord], path: str | os.PathLike[str]
               ) -> None:
    """Writes one HTML file, which needs no other file and no network.

    Several runs are drawn over each other.  The file is there in one piece:
    it is written under another name first.

    Args:
        records: Of at least one run and at most 26.
        path: Of the file, e.g. ``report.html``.

    Raises:
        ImportError: Bokeh is missing.
        ValueError: There is no record, or there are too many.
    """
    if not 1 <= len(records) <= MOST_RUNS:
        raise ValueError(f'a report is about 1 to {MOST_RUNS} runs, not '
                         f'{len(records)}')
    try:
        from bokeh.embed import json_item
        from bokeh.resources import Resources
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as reason:
        raise ImportError(
            'a report is drawn with Bokeh; install it with "pip install '
            '\'chainer_fp8pipe[report]\'"') from reason
    runs = ({'': records[0]} if len(records) == 1
            else dict(zip(_LETTERS, records, strict=False)))
    figures: dict[str, Drawing] = {}
    sections = []
    for name, title, answer, without in _SECTIONS:
        found = [*answer(runs)] or [without]
        drawings = {f'figure-{len(figures) + place}': one
                    for place, one in enumerate(
                        one for one in found if isinstance(one, Drawing))}
        figures |= drawings
        sections.append({
            'name': name, 'title': title, 'drawings': drawings,
            'sentences': [one for one in found if isinstance(one, str)],
            'tables': [one for one in found if isinstance(one, Table)]})
    # In a script element, no "<" may stand that could end it.
    data = json.dumps([
        {'name': name, 'item': json_item(one.plot),
         'shown': [*(one.choices or {}).values()]}
        for name, one in figures.items()]).replace('<', '\\u003c')
    # The library without widgets and tables, which the page does not have.
    scripts = [*Resources('inline', components=['bokeh'],
                          minified=True).js_raw,
               (_HERE / 'page.js').read_text(encoding='utf-8')]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.get_template('page.html').render(
        runs=runs, sections=sections, scripts=scripts, data=data,
        hashes=[base64.b64encode(hashlib.sha256(
            script.encode()).digest()).decode() for script in scripts])
    with written_whole(path) as file:
        file.write(text)


def _label(run: str, text: str) -> str:
    """A text about a run: its letter in front, if there are several."""
    return f'{run}: {text}' if run else text


def _by_rank(runs: _Runs) -> dict[str, list[RankInterval]]:
    """The intervals of each rank of each run, by label."""
    found: dict[str, list[RankInterval]] = {}
    for run, record in runs.items():
        for one in sorted(record.intervals, key=lambda one: one.rank):
            found.setdefault(_label(run, f'rank {one.rank}'), []).append(one)
    return found


def _side_by_side(found: Mapping[str, Mapping[str, str]], title: str = '',
                  sign: str = '') -> Table:
    """A column for each run, a row for each name that one of them has.

    A sign stands behind names of rows in which runs differ.
    """
    rows = []
    for name in dict.fromkeys(name for values in found.values()
                              for name in values):
        cells = [values.get(name, '-') for values in found.values()]
        rows.append((name + sign * (len({*cells}) > 1), *cells))
    return Table(('', *(f'run {run}' if run else '' for run in found)), rows,
                 title)


def _draw_several(title: str, unit: str, runs: _Runs,
                  lines: Mapping[str, Sequence[tuple[float, ...]]]
                  ) -> Iterator[Drawing]:
    """Lines of several points; single ones are in a table."""
    if max(map(len, lines.values()), default=0) > 1:
        yield draw_lines(title, unit, {
            name: points for name, points in lines.items() if points},
            _went_on(runs))


def _went_on(runs: _Runs) -> list[dict[str, float]]:
    """Where runs were started again."""
    return [{'iteration': start.iteration, 'epoch': point.epoch,
             'seconds': point.seconds} for record in runs.values()
            for start in record.starts if start.iteration
            for point in [point for point in record.curves
                          if point.start == start.number][:1]]


# --- what came out, and the curves -------------------------------------------

def _result(runs: _Runs) -> _Answer:
    """The verdict of each run, side by side."""
    found = {run: dict(rows(verdict(record)))
             for run, record in runs.items()}
    if any(found.values()):
        yield _side_by_side(found)


def _curves(runs: _Runs, section: str) -> _Answer:
    """A figure for each quantity of a section, a line per run and place."""
    quantities: dict[str, dict[tuple[str, str], list[tuple[float, ...]]]] = {}
    for run, record in runs.items():
        for point in record.curves:
            for name, value in point.values.items():
                quantities.setdefault(name.rsplit('/', 1)[-1], {}).setdefault(
                    (run, name), []).append((
                        point.iteration, value, point.epoch, point.seconds))
    letters, is_first = [*runs], section == 'learning'
    for quantity, found in sorted(quantities.items(), key=lambda item: (
            item[0] != 'loss', item[0] != 'accuracy', item[0])):
        title, unit, factor, where = _MEASURED.get(
            quantity, (quantity, '', 1.0, 'learning'))
        if where != section:
            continue
        places = sorted({name for _, name in found})
        styles = {}
        for order, (run, name) in enumerate(found):
            # One colour for each run, or else for each line.
            turn = letters.index(run) if len(runs) > 1 else order
            styles[_label(run, name)] = (
                LINE_COLOURS[turn % len(LINE_COLOURS)],
                places.index(name) > 0 if len(runs) > 1
                else order >= len(LINE_COLOURS))
        drawing = draw_lines(title, unit, {
            _label(*key): [(point[0], factor * point[1], *point[2:])
                           for point in points]
            for key, points in found.items()}, _went_on(runs), styles)
        drawing.has_axes, is_first = is_first, False
        yield drawing
        bad = sum(not numpy.isfinite(point[1]) for points in found.values()
                  for point in points)
        if bad:
            yield (f'{bad} values of {quantity} are not finite; their lines '
                   'have gaps there.')


# --- times -------------------------------------------------------------------

def _phases(runs: _Runs) -> _Answer:
    """Mean seconds of an update by phase."""
    for attribute, title in (
            ('phases', 'Mean time of an update by rank'),
            ('hidden', 'Done beside, in the thread that exchanges')):
        bars = {name: mean_phases(mine, attribute)
                for name, mine in _by_rank(runs).items()}
        known = dict.fromkeys((*PHASES, *sorted({
            phase for bar in bars.values() for phase in bar})))
        looks = {phase: look_of_name(phase) for phase in known
                 if any(bar.get(phase) for bar in bars.values())}
        if not looks:
            continue
        boxes, rows = [], []
        for row, (name, parts) in enumerate(bars.items()):
            left, whole, cells = 0.0, sum(parts.values()), []
            for phase, look in looks.items():
                value = parts.get(phase, 0.0)
                cells.append(f'{seconds(value)} '
                             f'({share(value / whole) if whole else "-"})')
                boxes.append(box(
                    1e3 * left, 1e3 * (left + value), row - 0.4, row + 0.4,
                    look.css, f'{name}: {look.label}, {cells[-1]}'))
                left += value
            rows.append((name, seconds(whole), *cells))
        yield draw_boxes(
            title, 'ms', [*bars], boxes,
            [[Table(('rank', 'all', *looks), rows)]],
            # Sends and receives look the same.
            [*dict.fromkeys((look.label, look.css)
                            for look in looks.values())], 24, wide=True)
    yield from _curves(runs, 'phases')


def _timeline(runs: _Runs) -> _Answer:
    """The timelines of chosen updates, a usual one first."""
    found = {_label(run, _update_name(update)): update
             for run, record in runs.items() for update in record.updates
             if any(event.end > event.start for event in update.events)}
    if not found:
        return
    usual = median(map(_length, found.values()))
    first, *others = sorted(found, key=lambda name: (
        found[name].is_slow, abs(_length(found[name]) - usual)))
    others.sort(key=lambda name: not found[name].is_slow)
    found[typical := f'{first}, a typical one'] = found.pop(first)
    shown: dict[str, list[Event]] = {}
    room = MOST_EVENTS
    for name in [typical, *others][:_MOST_UPDATES]:
        events = [event for event in explain_waits(found[name].events)
                  if event.end > event.start]   # marks of codecs take no time
        if not shown or len(events) <= room:
            room -= len(events)
            shown[name] = events
    left_out = len(found) - len(shown) + sum(
        record.left_out for record in runs.values())
    if left_out:
        yield (f'The events of {left_out} more updates are left out, to keep '
               'the page small.')
    yield ('Drag to move; Ctrl and the wheel, or a pinch, to zoom. The '
           'pointer on a box says what it is, and what was waited for. Where '
           'a row is blank, nothing was recorded.')
    legend: dict[Look, str] = {}
    ranks = range(1 + max(event.rank for events in shown.values()
                          for event in events))
    boxes = {name: _event_boxes(events, ranks, legend)
             for name, events in shown.items()}
    yield draw_boxes(
        'Timeline of all ranks', 'ms from the start of the update',
        [f'rank {rank}' for rank in ranks], boxes[typical],
        [[_sums(events)] for events in shown.values()],
        [(look.label, colour) for look, colour in sorted(legend.items())],
        52, zooms=True, wide=True, choices={
            name: columns_of(found) for name, found in boxes.items()})


def _length(update: RecordedUpdate) -> float:
    return (max(event.end for event in update.events)
            - min(event.start for event in update.events))


def _update_name(update: RecordedUpdate) -> str:
    return f'update {update.iteration}' + (
        ' (a slow one)' if update.is_slow else '') + (
            f', start {update.start}' if update.start else '')


def _event_boxes(events: Sequence[Event], ranks: Sequence[int],
                 legend: dict[Look, str]) -> list[dict[str, Any]]:
    """Boxes of a timeline, in ms; adds to the legend."""
    origin = min(event.start for event in events)
    boxes = []
    for event, look, top, height in boxes_of(events, ranks):
        waits = event.name == WAITING
        # Grey that is pale is seen on white and on black.
        legend[look] = GREY if waits else look.css
        boxes.append(box(
            round(1e3 * (event.start - origin), 4),
            round(1e3 * (event.end - origin), 4), top, top + 0.92 * height,
            legend[look], _what(event, look.label), 0.3 if waits else 1.0,
            look.hatch[:1] or ' '))
    return boxes


def _what(event: Event, label: str) -> str:
    """In words: who, what, how long, and what was waited for."""
    who, lasted = _who(event), seconds(event.end - event.start)
    if event.name == WAITING:
        return f'{who} waited {lasted} for {event.about}'
    return ', '.join([
        f'{who}: {label}', lasted,
        *([] if event.micro_batch is None
          else [f'micro-batch {event.micro_batch}']),
        *([size(event.bytes)] if event.bytes else []),
        *([event.about] if event.about else [])])


def _who(event: Event) -> str:
    return f'rank {event.rank}' + (f', {event.lane}' if event.lane else '')


def _sums(events: Sequence[Event]) -> Table:
    sums: dict[str, dict[Look, float]] = defaultdict(
        lambda: defaultdict(float))
    for event in sorted(events, key=lambda event: (
            event.rank, ('', *LANES).index(event.lane))):
        sums[_who(event)][look_of_name(event.name)] += event.end - event.start
    looks = sorted({look for row in sums.values() for look in row})
    return Table(
        ('rank', *(look.label for look in looks)),
        [(who, *(seconds(row.get(look, 0.0)) for look in looks))
         for who, row in sums.items()],
        'Time of each rank; what is inside of something else counts twice')


# --- what is slow ------------------------------------------------------------

def _slowness(runs: _Runs) -> _Answer:
    """Answers with the diagnosis, a table of each rank's work, and links."""
    last = {name: mine[-1] for name, mine in _by_rank(runs).items()}
    findings = [_label(run, finding.text) for run, record in runs.items()
                for finding in diagnose(record)]
    yield from findings
    if last and not findings:
        yield 'No rank and no link stands out.'
    if last:
        yield Table(
            ('rank', 'lower quartile', 'median', 'upper quartile',
             'whole update, median'),
            [(name, *map(seconds, (*one.own, one.step[1])))
             for name, one in last.items()],
            "A rank's own work in an update, last interval")
    for run, record in runs.items():
        if record.links:
            yield Table(
                ('from rank', 'to rank', 'bandwidth, upper quartile',
                 'latency, least'),
                [(*map(str, pair), f'{size(bandwidth)}/s', seconds(latency))
                 for pair, (bandwidth, latency) in sorted(
                     link_speeds(record.links).items(),
                     key=lambda item: (item[1][0], item[0]))],
                _label(run, 'Links between hosts, the slowest first'))


# --- bytes -------------------------------------------------------------------

def _bytes(runs: _Runs) -> _Answer:
    """Bytes of an update, the share of a link, predicted and measured."""
    found: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for run, record in runs.items():
        for one in record.intervals:
            for level, (codec, sent, whole) in one.sent.items():
                if sent:
                    found[_label(run, f'{codec}, {level}')].append(
                        (sent, whole, one.updates))
    if found:
        means = {name: numpy.average(
            [one[:2] for one in ours], axis=0,
            weights=[one[2] for one in ours]).tolist()
            for name, ours in found.items()}
        yield draw_bars(
            'Bytes that a rank sends in an update, mean', 'kB', {
                kind: {name: mean[place] for name, mean in means.items()}
                for place, kind in enumerate(('sent', 'in float32'))}, size,
            Table(('codec, level', 'sent', 'most of a rank', 'in float32',
                   'of it'),
                  [(name, size(mine), size(max(found[name])[0]), size(whole),
                    share(mine / whole) if whole else '-')
                   for name, (mine, whole) in means.items()]))
    yield from _curves(runs, 'bytes')
    for run, record in runs.items():
        for start in record.starts:
            if start.planned:
                yield _planned(run, record, start)


def _planned(run: str, record: RunRecord, start: RunStart) -> Drawing:
    """The parts of a step as a plan has predicted them, and as measured.

    What was measured is the newest interval, of the rank that takes longest.
    """
    slowest = max((one for one in record.intervals
                   if one.start == start.number),
                  key=lambda one: (one.last, one.step[1]), default=None)
    measured: dict[str, float] = defaultdict(float)
    for part, value in parts_of(slowest.phases if slowest else {}).items():
        measured[part if part in _PLANNED else 'other'] += value
    kinds = {'predicted': start.planned, 'measured': measured}
    rows = [(part, *(seconds(values[part]) if part in values else '-'
                     for values in kinds.values()))
            for part in dict.fromkeys([*start.planned, *measured])]
    rows.append(('all', f'{seconds(sum(start.planned.values()))} ± '
                 f'{share(start.spread)}',
                 seconds(sum(measured.values())) if measured else '-'))
    return draw_bars(
        _label(run, f'Plan of start {start.number}: {start.plan}'), 'ms',
        kinds, seconds, Table(('part of an update', *kinds), rows))


# --- compression, memory, input ----------------------------------------------

def _compression(runs: _Runs) -> _Answer:
    """A figure per value, with a line per tensor."""
    tensors: dict[str, list[TensorHealth]] = defaultdict(list)
    for run, record in runs.items():
        for item in record.tensors:
            tensors[_label(run, item.name)].append(item)
    if not tensors:
        return
    last = {name: items[-1] for name, items in tensors.items()}
    yield from _worst_tensors({name: item.values
                               for name, item in last.items()})
    largest = sorted(last, key=lambda name: -last[name].elements)
    values = [value for value in dict.fromkeys((*_VALUES, *sorted(
        value for item in last.values() for value in item.values)))
        if any(value in item.values for item in last.values())]
    for value in values:
        title, unit, factor = _VALUES.get(value, (value, '', 1.0))
        yield from _draw_several(title, unit, runs, {
            name: [(item.iteration, factor * item.values[value])
                   for item in tensors[name] if value in item.values]
            for name in largest[:_MOST_TENSORS]})
    yield Table(
        ('tensor', 'elements', *values),
        [(name, f'{last[name].elements:,}', *(
            number(last[name].values[value])
            if value in last[name].values else '-' for value in values))
         for name in largest], 'Last readings')


def _worst_tensors(last: dict[str, Mapping[str, float]]) -> Iterator[str]:
    clipped = {name: values['clipped'] for name, values in last.items()
               if 'clipped' in values}
    if clipped:
        worst = max(clipped, key=lambda name: clipped[name])
        yield (f'In the last reading, {worst} has the largest share of '
               f'clipped elements: {share(clipped[worst])}.'
               if clipped[worst] else
               'In the last reading no element was clipped.')
    ratios = {name: values['residual'] / values['gradient']
              for name, values in last.items()
              if values.get('gradient') and 'residual' in values}
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        yield (f'The largest residual, compared with the gradient: {worst}, '
               f'{number(ratios[worst])} times its norm. One that grows from '
               'reading to reading means that error feedback does not keep '
               'up.')


def _memory(runs: _Runs) -> _Answer:
    mine = _by_rank(runs)
    if not mine:
        return
    peaks = {name: max(one.peak for one in its) for name, its in mine.items()}
    worst = max(peaks, key=lambda name: peaks[name])
    yield f'The most: {size(peaks[worst])}, of {worst}.'
    for title, attribute in (('Memory of the process', 'resident'),
                             ('Arrays on the GPU', 'gpu_used')):
        yield from _draw_several(title, 'MB', runs, {
            name: [(one.last, value / 1e6) for one in its
                   if (value := getattr(one, attribute)) is not None]
            for name, its in mine.items()})
    yield Table(
        ('rank', 'at first', 'at last', 'most', 'most held on the GPU'),
        [(name, size(its[0].resident), size(its[-1].resident),
          size(peaks[name]),
          size(max(held)) if (held := [
              one.gpu_held for one in its if one.gpu_held is not None])
          else '-') for name, its in mine.items()], 'By rank')


def _input(runs: _Runs) -> _Answer:
    means = {name: mean_phases(its) for name, its in _by_rank(runs).items()
             if any('input' in one.phases for one in its)}
    if not means:
        return
    parts = {name: mean['input'] / max(sum(mean.values()), 1e-12)
             for name, mean in means.items()}
    worst = max(parts, key=lambda name: parts[name])
    yield (f'{"Yes" if parts[worst] > INPUT_SHARE else "No"} '
           f'({number(100 * parts[worst], 2)} %). The longest wait on '
           f'average is {seconds(means[worst]["input"])} an update, of '
           f'{worst}.')


# --- starts and settings -----------------------------------------------------

def _starts(runs: _Runs) -> _Answer:
    """Starts of the job and how they ended."""
    rows = []
    for run, record in runs.items():
        rows += [(_label(run, str(start.number)), *_start_row(record, start))
                 for start in record.starts]
        if record.starts:
            yield _label(run, endings(record)[1])
            start = record.starts[-1]
            if 0 < len(start.reporting) < start.ranks:
                yield _label(
                    run, f'{len(start.reporting)} of {start.ranks} ranks '
                    'report; what the others do is not known. Extend the '
                    'trainers of all ranks.')
        yield from (_label(run, remark) for remark in record.remarks)
    if rows:
        yield Table(
            ('start', 'end', 'began (UTC)', 'from update', 'to update',
             'lasted', 'ranks', 'hosts', 'by the launcher'), rows, 'Starts')


def _start_row(record: RunRecord, start: RunStart) -> tuple[str, ...]:
    end = next((end for end in record.ends if end.start == start.number),
               None)
    later = next((other for other in record.starts
                  if other.number > start.number), None)
    done = max((item.last for item in record.intervals
                if item.start == start.number), default=start.iteration)
    if end:
        # What rank 0 has raised follows from what the launcher has seen.
        how = (later.after if later and end.error else '') or end.error
        how, until, done = how or 'orderly', end.time, end.iteration
    elif later:
        how, until = later.after or 'crashed or was killed', later.time
        if later.iteration < done:
            how += (f'; updates {later.iteration + 1} to {done} were done '
                    'again')
    else:       # what it did after the last write is not known
        how, until = 'runs still, or was killed', record.last_seen
    began = datetime.datetime.fromtimestamp(
        start.time, datetime.timezone.utc).strftime('%Y-%m-%d %H:%M:%S')
    return (how, began, str(start.iteration), str(done),
            seconds(max(0.0, until - start.time)), str(start.ranks),
            str(len({*start.hosts})),
            '-' if start.launched is None else f'start {start.launched + 1}')


def _settings(runs: _Runs) -> _Answer:
    """Versions, options, environment and command of the last start."""
    starts = {run: record.starts[-1] for run, record in runs.items()
              if record.starts}
    if not starts:
        return
    tables = {'Command': {run: {
        'command': shlex.join(start.command), 'ranks': str(start.ranks),
        'hosts': ', '.join(dict.fromkeys(start.hosts))}
        for run, start in starts.items()}} | {
            title.capitalize(): {run: getattr(start, title)
                                 for run, start in starts.items()}
            for title in ('options', 'versions', 'environment')}
    for title, found in tables.items():
        if any(found.values()):
            yield _side_by_side(found, title, _DIFFERS)
    if len(runs) > 1:
        yield f'Settings that differ between runs have "{_DIFFERS[1:]}".'


#: In the order of the page: a name for links, the question, what answers it,
#: and what is said where there is no answer.
_SECTIONS: tuple[tuple[str, str, Callable[[_Runs], _Answer], str], ...] = (
    ('result', 'What came out?', _result, 'Nothing yet.'),
    ('learning', 'Is it learning?', lambda runs: _curves(runs, 'learning'),
     'No losses or metrics were reported.'),
    ('phases', 'Where does the time go?', _phases,
     'No times of updates were recorded.'),
    ('timeline', 'What does each rank do when?', _timeline,
     'No events of an update were kept.'),
    ('slow', 'Which rank or link is slow?', _slowness,
     'No times of updates were recorded.'),
    ('bytes', 'What crosses the network?', _bytes, 'No bytes were recorded.'),
    ('compression', 'Is compression healthy?', _compression,
     'No state of a codec was recorded.'),
    ('memory', 'How much memory does each rank take?', _memory,
     'No memory was recorded.'),
    ('input', 'Do ranks wait for their data?', _input,
     'No times of reading batches were recorded.'),
    ('starts', 'What died, and was it started again?', _starts,
     'No start was recorded.'),
    ('settings', 'What did it run with?', _settings, 'Nothing was recorded.'))
