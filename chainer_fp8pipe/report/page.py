"""One HTML page about runs: text, tables and SVG, without scripts."""
# A page is a list of sections.  Each is a question about a run, and a function
# that answers it.  A page compares several runs in the same figures: a letter
# stands for each, and begins the names of its lines and bars.  Single updates
# are files beside the page, which Perfetto shows.
from __future__ import annotations

import json
import math
import os
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from . import svg
from .diagnosis import diagnose
from .events import chrome_trace
from .quantities import seconds, share, size
from .record import PHASES, RankInterval, RunRecord, written_whole
from .timeline import draw_timeline, look_of
from .verdict import mean_of, mean_sent, verdict

#: A letter stands for each run on a page.
_LETTERS = string.ascii_uppercase
MOST_RUNS = len(_LETTERS)

_STYLE = '''
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px;
       margin: 0 auto; padding: 0 16px 32px }
h2 { border-bottom: 1px solid #8886; margin-top: 2em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
td, th { text-align: left; padding: 2px 14px 2px 0; font-weight: 400;
         border-bottom: 1px solid #8884; vertical-align: top }
thead th { font-weight: 600 }
td, p { overflow-wrap: break-word }
td:first-child { white-space: nowrap }
svg { width: 100%; min-width: 640px; max-width: 900px; fill: currentColor;
      font: 12px system-ui, sans-serif }
'''

_Runs = Mapping[str, RunRecord]


def write_page(records: Sequence[RunRecord], path: str | os.PathLike[str]
               ) -> None:
    """Writes a page about runs, and files of single updates beside it.

    Args:
        records: Of the runs, :data:`MOST_RUNS` at most.
        path: Of the page, which is replaced as a whole.  Beside it a usual
            and the slowest recorded update of each run are written as
            Chrome traces, ``report_usual.json`` for ``report.html``.

    Raises:
        OSError: A file cannot be written.
    """
    runs = ({'': records[0]} if len(records) == 1 else {
        f'{letter}: ': record for letter, record in zip(
            _LETTERS, records, strict=False)})
    stem = os.path.splitext(os.fspath(path))[0]
    sections = {
        'What came out?': _side_by_side(
            {run: {'run': record.name, **dict(verdict(record))}
             for run, record in runs.items()}) + _paragraphs(
            run + remark for run, record in runs.items()
            for remark in record.remarks),
        'Is it learning?': _curves(runs),
        'Where does the time go?': _phases(runs),
        'What does each rank do when?': ''.join(
            _timelines(run, record, f'{stem}{"_" * bool(run)}{run[:1]}')
            for run, record in runs.items()),
        'Which rank is slow?': _paragraphs(
            run + one.text for run, record in runs.items()
            for one in diagnose(record)) or _paragraphs(
                ['None stands out.']),
        'What crosses the network?': _table(
            ('', 'as', 'sent in an update', 'in float32'), [
                (name, codec, size(sent[codec]), size(float32[codec]))
                for name, its in _by_rank(runs).items()
                for sent, float32 in [mean_sent(its)] for codec in sent]),
        'How much memory?': _table(('', 'most of the process'), [
            (name, size(most)) for name, its in _by_rank(runs).items()
            if (most := max(one.peak for one in its))]),
        'What did it run with?': _side_by_side({
            run: {'command': ' '.join(start.command), **start.options,
                  **start.versions}
            for run, record in runs.items() for start in record.starts[-1:]})}
    title = svg.escaped(', '.join(record.name for record in records))
    with written_whole(path, 'wb') as file:
        file.write((
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width">\n'
            f'<title>{title}</title>\n<style>{_STYLE}</style></head>\n'
            f'<body><h1>{title}</h1>\n' + '\n'.join(
                f'<h2>{question}</h2>\n'
                f'{answer or _paragraphs(["Nothing was recorded."])}'
                for question, answer in sections.items())
            # Names of files may be no UTF-8.
            + '\n</body></html>\n').encode(errors='replace'))


def _curves(runs: _Runs) -> str:
    """A figure for each quantity, a line for each run and place."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list))
    for run, record in runs.items():
        for point in record.curves:
            for name, value in point.values.items():
                series[name.rsplit('/', 1)[-1]][run + name].append(
                    (point.iteration, value))
    again = [start.iteration for record in runs.values()
             for start in record.starts if start.iteration]
    found = ''
    for name in sorted(series, key=lambda name: (
            name != 'loss', name != 'accuracy', name)):
        found += _figure(name, svg.lines(name, series[name], again))
        if bad := sum(not math.isfinite(value) for line in
                      series[name].values() for _, value in line):
            found += _paragraphs([f'{bad} values of {name} are not finite; '
                                  'lines have gaps there.'])
    return found


def _phases(runs: _Runs) -> str:
    """Mean time of an update by rank: bars, and the same as a table."""
    found = ''
    for attribute, title in (
            ('phases', 'Mean time of an update by rank'),
            ('hidden', 'Done beside, in the thread that exchanges')):
        bars = {name: mean_of(its, [getattr(one, attribute) for one in its])
                for name, its in _by_rank(runs).items()}
        used = [phase for phase in PHASES
                if any(bar.get(phase) for bar in bars.values())]
        boxes, cells = [], []
        for row, (name, bar) in enumerate(bars.items()):
            left, whole = 0.0, sum(bar.values()) or 1.0
            cells.append([name, seconds(sum(bar.values()))])
            for phase in used:
                right = left + 1e3 * bar.get(phase, 0.0)
                cells[-1].append(f'{seconds(bar.get(phase, 0.0))} '
                                 f'({share(bar.get(phase, 0.0) / whole)})')
                boxes.append(svg.Box(
                    row, 0.0, 1.0, left, right, look_of(phase)[1],
                    f'{name}: {phase}, {cells[-1][-1]}'))
                left = right
        if used:
            found += _figure(title, svg.boxes(
                title, 'ms', [*bars], boxes, dict(map(look_of, used)))
            ) + _table(('', 'all', *used), cells)
    return found


def _timelines(run: str, record: RunRecord, stem: str) -> str:
    """A usual update and the slowest one, and files of both."""
    by_time = sorted(record.updates, key=lambda one: one.seconds)
    found = ''
    for kind, update in zip(('usual', 'slowest'), (
            *by_time[(len(by_time) - 1) // 2:][:1], *by_time[-1:]),
            strict=False):
        path = f'{stem}_{kind}.json'
        with written_whole(path) as file:
            json.dump(chrome_trace(update.events), file)
        found += _figure(
            f'{run}update {update.iteration}, the {kind} one of '
            f'{len(by_time)} recorded',
            draw_timeline('Timeline of all ranks', update.events))
        found += _paragraphs([
            f'{os.path.basename(path)} has it for ui.perfetto.dev.'])
    return found


def _by_rank(runs: _Runs) -> dict[str, list[RankInterval]]:
    """The intervals of each rank in the last start of each run."""
    found: dict[str, list[RankInterval]] = defaultdict(list)
    for run, record in runs.items():
        for one in sorted(record.intervals[-1] if record.intervals else (),
                          key=lambda one: one.rank):
            found[f'{run}rank {one.rank}'].append(one)
    return found


# --- HTML --------------------------------------------------------------------

def _paragraphs(texts: Iterable[str]) -> str:
    return ''.join(f'<p>{svg.escaped(text)}</p>\n' for text in texts)


def _figure(title: str, figure: str) -> str:
    return (f'<h3>{svg.escaped(title)}</h3>\n'
            f'<div class="wide">{figure}</div>\n' if figure else '')


def _side_by_side(found: Mapping[str, Mapping[str, str]]) -> str:
    """A table of what runs have by name, a column for each."""
    names = dict.fromkeys(name for its in found.values() for name in its)
    return _table(('', *(run.rstrip(': ') for run in found)), [
        (name, *(its.get(name, '-') for its in found.values()))
        for name in names])


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose rows begin with a name; '' without rows."""
    def row(cells: Sequence[str], tag: str) -> str:
        return '<tr>' + ''.join(
            f'<{tag}>{svg.escaped(str(cell))}</{tag}>' for cell in cells
        ) + '</tr>\n'
    return ('<div class="wide"><table><thead>' + row(header, 'th')
            + '</thead>' + ''.join(row(line, 'td') for line in lines)
            + '</table></div>\n') if lines else ''
