"""One HTML page about runs, which opens from disk without a network."""
# A page is a list of sections.  Each answers a question that one has about a
# run, first in a sentence or a table, then in figures (figures.py) whose
# numbers follow in tables.  Text is plain here; the template, page.html,
# escapes it.  Bokeh, the page's script and its data stand in the file, and a
# content security policy names the scripts by their hashes and allows nothing
# else, so that no name of a run, a parameter or a host becomes a script.
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
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy

from .atomic_write import written_whole
from .diagnosis import INPUT_SHARE, diagnose, explain_waits, link_share
from .events import Event
from .figures import (
    LINE_COLOURS,
    MOST_ROWS,
    Drawing,
    Points,
    Table,
    curves,
    line_bundle,
    link_square,
    paired_bars,
    phase_bars,
    quartile_bars,
    timelines,
)
from .quantities import number, seconds, share, size
from .record import (
    FIRST,
    PHASES,
    REGULAR,
    SLOW,
    PlannedStep,
    RankInterval,
    RecordedUpdate,
    RunRecord,
    RunStart,
    SentBytes,
    TensorHealth,
)

#: A page holds the timelines of so many updates, and of so many events;
#: further updates are left out.
_MOST_UPDATES, MOST_EVENTS = 12, 60_000

#: Figures show so many tensors, the largest.
_MOST_TENSORS = 100

_HERE = pathlib.Path(__file__).parent

#: By the letter that stands for each; '' for a single one.
_Runs = dict[str, RunRecord]


@dataclass
class Section:
    """A question about a run, and its answer.

    Attributes:
        name: For links; letters and '-'.
        title: The question.
        sentences: What is to be said first.
        drawings: Figures.
        tables: Tables that belong to no figure.
        is_open: Whether these are unfolded.
    """

    name: str
    title: str
    sentences: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    is_open: bool = False


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
    if not 1 <= len(records) <= len(string.ascii_uppercase):
        raise ValueError('a report is about 1 to '
                         f'{len(string.ascii_uppercase)} runs, not '
                         f'{len(records)}')
    text = page_text(records)
    with written_whole(path) as file:
        file.write(text)


def page_text(records: Sequence[RunRecord]) -> str:
    """The page as text; see :func:`write_page`."""
    try:
        from bokeh.embed import json_item
        from bokeh.resources import Resources
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as reason:
        raise ImportError(
            'a report is drawn with Bokeh; install it with "pip install '
            '\'chainer_fp8pipe[report]\'"') from reason
    runs = ({'': records[0]} if len(records) == 1
            else dict(zip(string.ascii_uppercase, records, strict=False)))
    sections = [make(runs) for make in (
        _result, _learning, _phases, _timeline, _slowness, _bytes,
        _compression, _memory, _input, _starts, _settings)]
    drawings = [drawing for section in sections
                for drawing in section.drawings]
    names = {id(drawing): f'figure-{place}'
             for place, drawing in enumerate(drawings)}
    # In a script element, no "<" may stand that could end it.
    data = json.dumps({'figures': [
        {'name': names[id(drawing)],
         'item': json_item(drawing.model), 'shown': drawing.shown}
        for drawing in drawings]}).replace('<', '\\u003c')
    # The library without widgets and tables, which the page does not have.
    scripts = [*Resources('inline', components=['bokeh'],
                          minified=True).js_raw,
               (_HERE / 'page.js').read_text(encoding='utf-8')]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined)
    return environment.get_template('page.html').render(
        runs=runs, sections=sections, scripts=scripts, data=data,
        name_of=lambda drawing: names[id(drawing)],
        hashes=[f"'sha256-{base64.b64encode(digest).decode()}'"
                for digest in (hashlib.sha256(script.encode()).digest()
                               for script in scripts)])


def _label(run: str, text: str) -> str:
    """A text about a run: its letter in front, if there are several."""
    return f'{run} {text}' if run else text


def _said(run: str, sentence: str) -> str:
    """A sentence about a run: which one, if there are several."""
    return f'Run {run}: {sentence}' if run else sentence


def _date(time: float) -> str:
    return datetime.datetime.fromtimestamp(
        time, datetime.timezone.utc).strftime('%Y-%m-%d %H:%M:%S')


# --- what came out -----------------------------------------------------------

def _result(runs: _Runs) -> Section:
    """What one asks first, side by side for all runs."""
    section = Section('result', 'What came out?', is_open=True)
    found = {run: dict(_results(record)) for run, record in runs.items()}
    names = dict.fromkeys(name for values in found.values()
                          for name in values)
    if names:
        section.tables.append(Table(
            ('', *(f'run {run}' if run else '' for run in runs)),
            [(name, *(values.get(name, '-') for values in found.values()))
             for name in names]))
    else:
        section.sentences.append('Nothing yet.')
    return section


def _results(record: RunRecord) -> Iterator[tuple[str, str]]:
    values: dict[str, list[float]] = defaultdict(list)
    for point in record.curves:
        for name, value in point.values.items():
            values[name].append(value)
    for name in sorted(values, key=lambda name: ('/' not in name, name)):
        if name.rsplit('/', 1)[-1] in ('loss', 'accuracy'):
            # Of updates there are many points, which are noisy.
            last = values[name][-max(1, len(values[name]) // 20):]
            yield f'{name}, at the end', number(fmean(last))
    if record.curves:
        point = record.curves[-1]
        yield 'updates, epochs', f'{point.iteration:,}, {point.epoch:.2f}'
    start = record.starts[-1] if record.starts else None
    steps: dict[int, float] = {}
    for one in record.intervals:
        if start and one.start == start.number:
            steps[one.last] = max(one.step.median, steps.get(one.last, 0.0))
    if steps:
        yield 'an update (median, slowest rank)', seconds(
            median(steps.values()))
        yield 'a rank sends in an update (gradients; to stages)', ', '.join(
            size(fmean(getattr(one, name) for one in record.intervals
                       if one.start == record.starts[-1].number))
            for name in ('bytes', 'stage_bytes'))
    if record.starts:
        yield 'began (UTC)', _date(record.starts[0].time)
        until = max([record.last_seen, *(end.time for end in record.ends)])
        yield 'lasted', seconds(max(0.0, until - record.starts[0].time))
        yield 'ranks, hosts', (f'{record.starts[-1].ranks}, '
                               f'{len({*record.starts[-1].hosts})}')


# --- is it learning ----------------------------------------------------------

#: Values that this package reports, which have a unit.
_UNITS = {'bytes': 'bytes per update', 'encode': 'ms per update',
          'exchange': 'ms per update', 'decode': 'ms per update',
          'step_time': 's', 'predicted_step_time': 's'}


def _learning(runs: _Runs) -> Section:
    """A figure for each quantity, with a line per run and place."""
    section = Section('learning', 'Is it learning?')
    quantities: dict[str, dict[tuple[str, str], list[tuple[float, ...]]]] = {}
    for run, record in runs.items():
        for point in record.curves:
            for name, value in point.values.items():
                quantities.setdefault(name.rsplit('/', 1)[-1], {}).setdefault(
                    (run, name), []).append((
                        float(point.iteration), point.epoch, point.seconds,
                        float(value)))
    if not quantities:
        section.sentences.append('No losses or metrics were reported.')
    went_on = [{'iteration': start.iteration, 'epoch': point.epoch,
                'seconds': point.seconds} for record in runs.values()
               for start in record.starts if start.iteration
               for point in [point for point in record.curves
                             if point.start == start.number][:1]]
    letters = [*runs]
    for quantity, found in sorted(quantities.items(), key=lambda item: (
            item[0] != 'loss', item[0] != 'accuracy', item[0] in _UNITS,
            item[0])):
        places = sorted({name for _, name in found})
        styles = {}
        for order, (run, name) in enumerate(found):
            # One colour for each run, or else for each line.
            turn = letters.index(run) if len(runs) > 1 else order
            styles[_label(run, name)] = (
                LINE_COLOURS[turn % len(LINE_COLOURS)],
                places.index(name) > 0 if len(runs) > 1
                else order >= len(LINE_COLOURS))
        lines = {_label(*key): numpy.array(points)
                 for key, points in found.items()}
        section.drawings.append(curves(
            quantity, _UNITS.get(quantity, ''), lines, styles, went_on
            )._replace(has_axes=not section.drawings))
        bad = sum(int((~numpy.isfinite(line[:, 3])).sum())
                  for line in lines.values())
        if bad:
            section.sentences.append(f'{bad} values of {quantity} are not '
                                     'finite; their lines have gaps there.')
    return section


# --- where the time goes -----------------------------------------------------

def _phases(runs: _Runs) -> Section:
    """Mean seconds of an update by phase."""
    section = Section('phases', 'Where does the time go?')
    mine = {_label(run, f'rank {rank}'): intervals
            for run, record in runs.items()
            for rank, intervals in _by_rank(record.intervals).items()}
    main = {name: mean_phases(intervals, lambda one: one.phases)
            for name, intervals in mine.items()}
    hidden = {name: mean_phases(intervals, lambda one: one.hidden)
              for name, intervals in mine.items()}
    if not main:
        section.sentences.append('No times of updates were recorded.')
        return section
    section.drawings.append(phase_bars(
        'Mean time of an update by rank', main, PHASES))
    if any(any(bar.values()) for bar in hidden.values()):
        section.drawings.append(phase_bars(
            'Done beside, in the thread that exchanges', hidden, PHASES))
    return section


def _by_rank(intervals: Sequence[RankInterval]
             ) -> dict[int, list[RankInterval]]:
    found: dict[int, list[RankInterval]] = defaultdict(list)
    for one in intervals:
        found[one.rank].append(one)
    return dict(sorted(found.items()))


def mean_phases(intervals: Sequence[RankInterval],
                phases: Callable[[RankInterval], Mapping[str, float]]
                ) -> dict[str, float]:
    """Means over all updates of intervals, by phase."""
    count = sum(one.last - one.first + 1 for one in intervals)
    found: dict[str, float] = defaultdict(float)
    for one in intervals:
        for name, value in phases(one).items():
            found[name] += (one.last - one.first + 1) / count * value
    return dict(found)


# --- what each rank does when ------------------------------------------------

def _timeline(runs: _Runs) -> Section:
    """The timelines of chosen updates, a usual one first."""
    section = Section('timeline', 'What does each rank do when?')
    everything = [(run, update) for run, record in runs.items()
                  for update in record.updates]
    usual = median([_length(update) for _, update in everything
                    if update.events] or [0.0])
    # The first ones allocate and connect, so that they are not like others.
    everything.sort(key=lambda item: (
        item[1].why == FIRST, abs(_length(item[1]) - usual)))
    order = [*everything[:1], *(item for item in everything[1:]
                                if item[1].why == SLOW), *everything[1:]]
    shown: dict[str, list[Event]] = {}
    room = MOST_EVENTS
    for run, update in order:
        if len(shown) == _MOST_UPDATES:
            break
        events = [event for event in explain_waits(
            update.events, runs[run].stages(update.start))
            if event.end > event.start]     # marks of codecs take no time
        name = _update_name(run, update)
        if name not in shown and events and (
                not shown or len(events) <= room):
            room -= len(events)
            shown[name] = events
    left_out = sum(record.left_out for record in runs.values()) + len(
        {_update_name(*item) for item in everything if item[1].events}
        - {*shown})
    if not shown:
        section.sentences.append('No events of an update were kept.')
        return section
    if left_out:
        section.sentences.append(f'The events of {left_out} more updates are '
                                 'left out, to keep the page small.')
    section.sentences.append(
        'Drag to move; Ctrl and the wheel, or a pinch, to zoom. The pointer '
        'on a box says what it is, and what was waited for.')
    section.drawings.append(timelines('Timeline of all ranks', shown))
    return section


def _length(update: RecordedUpdate) -> float:
    return (max((event.end for event in update.events), default=0.0)
            - min((event.start for event in update.events), default=0.0))


def _update_name(run: str, update: RecordedUpdate) -> str:
    why = {FIRST: ' (one of the first)', SLOW: ' (a slow one)',
           REGULAR: ''}.get(update.why, '')
    return _label(run, f'update {update.iteration}{why}') + (
        f', start {update.start}' if update.start else '')


# --- which rank or link is slow ----------------------------------------------

def _slowness(runs: _Runs) -> Section:
    """What the diagnosis says, each rank's own work, and the links."""
    section = Section('slow', 'Which rank or link is slow?')
    section.sentences += [_said(run, finding.text)
                          for run, record in runs.items()
                          for finding in diagnose(record)]
    has_times = any(record.intervals for record in runs.values())
    if not section.sentences:
        section.sentences.append(
            'No rank and no link stands out.' if has_times
            else 'No times of updates were recorded.')
    if has_times:
        last = {_label(run, f'rank {rank}'): mine[-1]
                for run, record in runs.items()
                for rank, mine in _by_rank(record.intervals).items()}
        section.drawings.append(quartile_bars(
            "A rank's own work in an update, last interval",
            {name: one.own[:3] for name, one in last.items()}, Table(
                ('rank', 'lower quartile', 'median', 'upper quartile',
                 'longest', 'whole update, median'),
                [(name, *map(seconds, (
                    one.own.low, one.own.median, one.own.high, one.own.most,
                    one.step.median))) for name, one in last.items()])))
    for run, record in runs.items():
        if record.links:
            section.drawings.append(_links(run, record))
        clocks = {(item.start, item.rank): item for item in record.clocks}
        if clocks:
            section.tables.append(Table(
                ('start', 'rank', "ahead of rank 0's", 'right to', 'drift'),
                [(str(start), str(rank), f'{number(item.offset)} s',
                  seconds(item.error), seconds(item.drift))
                 for (start, rank), item in sorted(clocks.items())],
                _label(run, 'Clocks')))
    return section


def _links(run: str, record: RunRecord) -> Drawing:
    readings = defaultdict(list)
    for link in record.links:
        readings[link.source, link.target].append(link)
    pairs = {pair: (median(link.bandwidth for link in found),
                    median(link.latency for link in found),
                    found[-1].is_local)
             for pair, found in sorted(readings.items())}
    slowest = sorted(pairs.items(), key=lambda item: item[1][0])[:MOST_ROWS]
    return link_square(
        _label(run, 'Links, each compared with those of its kind'), pairs,
        Table(('from rank', 'to rank', 'bandwidth, median',
               'latency, median', 'where'), [
                   (str(source), str(target), size(bandwidth) + '/s',
                    seconds(latency),
                    'one host' if is_local else 'two hosts')
                   for (source, target), (bandwidth, latency, is_local)
                   in slowest],
              remark='' if len(slowest) == len(pairs)
              else f'The slowest {len(slowest)} of {len(pairs):,}.'))


# --- what crosses the network ------------------------------------------------

def _bytes(runs: _Runs) -> Section:
    """Bytes of an update, the share of the link, predicted and measured."""
    section = Section('bytes', 'What crosses the network?')
    sent: dict[str, list[SentBytes]] = defaultdict(list)
    for run, record in runs.items():
        for item in record.sent:
            sent[_label(run, f'{item.codec}, {item.level}')].append(item)
    if sent:
        # Of some updates, so that means weigh them by their updates.
        means = {name: numpy.average(
            [(item.bytes, item.uncompressed) for item in items], axis=0,
            weights=[item.updates for item in items]).tolist()
            for name, items in sent.items()}
        section.drawings.append(paired_bars(
            'Bytes that a rank sends in an update, mean', [*means],
            {'sent': [mean[0] / 1e3 for mean in means.values()],
             'in float32': [mean[1] / 1e3 for mean in means.values()]},
            'kB', Table(
                ('codec, level', 'sent', 'most of a rank', 'in float32',
                 'of it'),
                [(name, size(mine), size(max(
                    item.bytes for item in sent[name])), size(whole),
                  share(mine / whole) if whole else '-')
                 for name, (mine, whole) in means.items()])))
    else:
        section.sentences.append('No bytes were recorded.')
    for run, record in runs.items():
        for start in record.starts[-1:]:
            part = link_share(record, start.number)
            if part is not None:
                section.sentences.append(_said(
                    run, 'Between hosts the busiest rank sends '
                    f'{share(part)} of what a link carries, on average.'))
        for plan in record.plans:
            section.drawings.append(_planned(run, plan))
            measured = [item.bytes for item in record.intervals
                        if item.start == plan.start]
            if plan.bytes is not None:
                section.sentences.append(_said(run, (
                    f'Start {plan.start}: the plan predicts '
                    f'{size(plan.bytes)} per rank and update') + (
                        f'; sent were {size(fmean(measured))}, mean of all '
                        'ranks.' if measured else '.')))
    return section


def _planned(run: str, plan: PlannedStep) -> Drawing:
    parts = [*plan.parts, *(set(plan.measured) - set(plan.parts))]
    kinds = {'predicted': plan.parts, 'measured': plan.measured}
    rows = [(part, *(seconds(values[part]) if part in values else '-'
                     for values in kinds.values())) for part in parts]
    rows.append(('all', f'{seconds(plan.seconds)} ± {share(plan.spread)}',
                 seconds(sum(plan.measured.values())) if plan.measured
                 else '-'))
    return paired_bars(
        _label(run, f'Plan of start {plan.start}: {plan.description}'), parts,
        {kind: [1e3 * values.get(part, 0.0) for part in parts]
         for kind, values in kinds.items()}, 'ms',
        Table(('part of an update', *kinds), rows))


# --- compression -------------------------------------------------------------

_VALUES = {'scale': 'Scale', 'q': 'Quantile that sets the scale',
           'clipped': 'Share of elements that were clipped',
           'residual': 'Norm of the residual (error feedback)',
           'gradient': 'Norm of the mean gradient'}


def _compression(runs: _Runs) -> Section:
    """A figure per value, with a line per tensor."""
    section = Section('compression', 'Is compression healthy?')
    tensors: dict[str, list[TensorHealth]] = defaultdict(list)
    for run, record in runs.items():
        for item in record.tensors:
            tensors[_label(run, item.name)].append(item)
    if not tensors:
        section.sentences.append('No state of a codec was recorded.')
        return section
    section.sentences += _worst_tensors(
        {name: items[-1].values for name, items in tensors.items()})
    shown = sorted(tensors, key=lambda name: -tensors[name][-1].elements)
    if len(shown) > _MOST_TENSORS:
        section.sentences.append(
            f'The figures show the {_MOST_TENSORS} largest of {len(shown)} '
            'tensors.')
    values = sorted({value for items in tensors.values() for item in items
                     for value in item.values},
                    key=lambda value: ([*_VALUES, value].index(value), value))
    for value in values:
        lines = {name: [(item.start, item.iteration, item.values[value])
                        for item in tensors[name] if value in item.values]
                 for name in shown[:_MOST_TENSORS]}
        section.drawings.append(line_bundle(
            _VALUES.get(value, value),
            {name: points for name, points in lines.items() if points},
            logarithmic=value != 'clipped'))
    section.tables.append(Table(
        ('tensor', 'elements', *values),
        [(name, f'{tensors[name][-1].elements:,}', *(
            number(tensors[name][-1].values[value])
            if value in tensors[name][-1].values else '-'
            for value in values)) for name in shown[:MOST_ROWS]],
        'Last readings'))
    return section


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


# --- ranks' memory and input -------------------------------------------------

def _memory(runs: _Runs) -> Section:
    section = Section('memory', 'How much memory does each rank take?')
    process: dict[str, Points] = {}
    gpu: dict[str, Points] = {}
    rows, peaks = [], {}
    for run, record in runs.items():
        for rank in sorted({item.rank for item in record.memory}):
            mine = [item for item in record.memory if item.rank == rank]
            name = _label(run, f'rank {rank}')
            process[name] = [(item.start, item.iteration,
                              item.resident / 1e6) for item in mine]
            held = [item.gpu_held for item in mine
                    if item.gpu_held is not None]
            if held:
                gpu[name] = [(item.start, item.iteration,
                              (item.gpu_used or 0) / 1e6) for item in mine]
            peaks[name] = max(item.peak for item in mine)
            rows.append((name, size(mine[0].resident),
                         size(mine[-1].resident), size(peaks[name]),
                         size(max(held)) if held else '-'))
    if not rows:
        section.sentences.append('No memory was recorded.')
        return section
    worst = max(peaks, key=lambda name: peaks[name])
    section.sentences.append(f'The most: {size(peaks[worst])}, of {worst}.')
    section.drawings.append(line_bundle('Memory of the process', process,
                                        unit='MB'))
    if gpu:
        section.drawings.append(line_bundle('Arrays on the GPU', gpu,
                                            unit='MB'))
    section.tables.append(Table(
        ('rank', 'at first', 'at last', 'most', 'most held on the GPU'),
        rows, 'By rank'))
    return section


def _input(runs: _Runs) -> Section:
    section = Section('input', 'Do ranks wait for their data?')
    lines: dict[str, Points] = {}
    rows, parts = [], {}
    for run, record in runs.items():
        for rank, mine in _by_rank(record.intervals).items():
            mean = mean_phases(mine, lambda one: {
                **one.phases, 'step': one.step.mean})
            if 'input' not in mean:
                continue
            name = _label(run, f'rank {rank}')
            lines[name] = [(one.start, one.last,
                            1e3 * one.phases.get('input', 0.0))
                           for one in mine]
            parts[name] = mean['input'] / max(mean['step'], 1e-12)
            rows.append((name, seconds(mean['input']), share(parts[name])))
    if not lines:
        section.sentences.append('No times of reading batches were recorded.')
        return section
    worst = max(rows, key=lambda row: parts[row[0]])
    section.sentences.append(
        f'{"Yes" if parts[worst[0]] > INPUT_SHARE else "No"} ({worst[2]}). '
        f'The longest on average: {worst[0]}, {worst[1]} of an update.')
    section.drawings.append(line_bundle('Mean time for a batch', lines,
                                        unit='ms'))
    section.tables.append(Table(
        ('rank', 'waits for a batch', 'of the update'), rows,
        'Mean of all updates'))
    return section


# --- what died, and what it ran with -----------------------------------------

def _starts(runs: _Runs) -> Section:
    """Starts of the job and how they ended."""
    section = Section('starts', 'What died, and was it started again?',
                      is_open=True)
    rows = []
    for run, record in runs.items():
        rows += [_start_row(run, record, start) for start in record.starts]
        if record.starts:
            section.sentences.append(_said(run, _endings(record)))
            start = record.starts[-1]
            if 0 < len(start.reporting) < start.ranks:
                section.sentences.append(_said(
                    run, f'{len(start.reporting)} of {start.ranks} ranks '
                    'report; what the others do is not known. Extend the '
                    'trainers of all ranks.'))
        section.sentences += [_said(run, remark)
                              for remark in record.remarks]
    if rows:
        section.tables.append(Table(
            ('start', 'began (UTC)', 'from update', 'to update', 'lasted',
             'ranks', 'hosts', 'by the launcher', 'end'), rows, 'Starts'))
    else:
        section.sentences.append('No start was recorded.')
    return section


def _endings(record: RunRecord) -> str:
    """How the starts ended, in one sentence."""
    last = record.starts[-1].number
    errors = {end.start: end.error for end in record.ends}
    died = sum(bool(errors.get(start.number, start.number != last))
               for start in record.starts)
    words = ([f'{died} crashed or {"was" if died == 1 else "were"} killed']
             if died else [])
    if last not in errors:
        words.append('the last one has no end: it runs, or was killed')
    number = len(record.starts)
    count = 'One start' if number == 1 else f'{number} starts'
    if number == 1 and died:
        return f'One start, which crashed: {errors[last]}.'
    if number == 1 and words:
        return 'One start, which has no end: it runs, or was killed.'
    return (f'{count}: {"; ".join(words)}.' if words
            else f'Nothing died: {count.lower()}.')


def _start_row(run: str, record: RunRecord, start: RunStart
               ) -> tuple[str, ...]:
    end = next((end for end in record.ends if end.start == start.number),
               None)
    later = [other for other in record.starts if other.number > start.number]
    done = max((item.last for item in record.intervals
                if item.start == start.number), default=start.iteration)
    if end:
        how, until, done = end.error or 'orderly', end.time, end.iteration
    else:
        how = ((later[0].after or 'crashed or was killed')
               if later else 'runs still, or was killed')
        # What it did after the last write is not known.
        until = later[0].time if later else record.last_seen
        if later and later[0].iteration < done:
            how += (f'; updates {later[0].iteration + 1} to {done} were '
                    'done again')
    return (_label(run, str(start.number)), _date(start.time),
            str(start.iteration), str(done),
            seconds(max(0.0, until - start.time)), str(start.ranks),
            str(len({*start.hosts})),
            '-' if start.launched is None else f'start {start.launched + 1}',
            how)


def _settings(runs: _Runs) -> Section:
    """Versions, options, environment and command of the last start."""
    section = Section('settings', 'What did it run with?', is_open=True)
    starts = {run: record.starts[-1] for run, record in runs.items()
              if record.starts}
    if not starts:
        section.sentences.append('Nothing was recorded.')
        return section
    header = ('', *(f'run {run}' if run else '' for run in starts))
    section.tables.append(Table(header, [
        ('command', *(shlex.join(start.command)
                      for start in starts.values())),
        ('ranks', *(str(start.ranks) for start in starts.values())),
        ('hosts', *(', '.join(dict.fromkeys(start.hosts))
                    for start in starts.values()))], 'Command'))
    for title in ('options', 'versions', 'environment'):
        parts = [getattr(start, title) for start in starts.values()]
        names = dict.fromkeys(name for part in parts for name in part)
        if names:
            section.tables.append(Table(header, [
                (name, *(str(part.get(name, '-')) for part in parts))
                for name in names], title.capitalize()))
    return section
