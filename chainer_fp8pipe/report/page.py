"""``python -m chainer_fp8pipe report``: a verdict, and an HTML page.

The page is text, tables and SVG, without scripts: a list of questions about a
run, and their answers.
"""
from __future__ import annotations

import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ..command_line import Parser, reason
from . import svg
from .quantities import seconds, size
from .record import (
    PHASES,
    RankInterval,
    RunRecord,
    read_record,
    written_whole,
)
from .stream import Event
from .verdict import diagnose, mean_of, mean_sent, text, verdict

_DESCRIPTION = """
Prints a run's verdict, and makes one HTML page about it.  FOLDER is the result
folder of a training (Trainer's out), where an extension records the run, and
makes the same page at its end; this command makes it earlier:

    trainer.extend(chainer_fp8pipe.RunReport(comm))

exit codes: 0; 2: the folder has no record, or one that cannot be read
"""
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


def write_page(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Writes a page about a run, and a file for Perfetto beside it.

    That is a usual update as Chrome trace, ``report.json`` for
    ``report.html``.  OSError: a file cannot be written.
    """
    ranks: dict[str, list[RankInterval]] = defaultdict(list)
    for one in sorted(record.intervals, key=lambda one: one.rank):
        ranks[f'rank {one.rank}'].append(one)
    sections = {
        'What came out?': _table(verdict(record))
        + _paragraphs(record.remarks),
        'Is it learning?': _curves(record),
        'Where does the time go?': _phases(ranks),
        'What does each rank do when?': _timeline(
            record, os.path.splitext(os.fspath(path))[0] + '.json'),
        'Which rank is slow?': _paragraphs(
            diagnose(record) or ['None stands out.']),
        'What crosses the network?': _table([
            (name, codec, size(sent), size(float32))
            for name, its in ranks.items()
            for codec, sent, float32 in mean_sent(its)],
            ('', 'as', 'sent in an update', 'in float32')),
        'What did it run with?': _table([
            pair for start in record.starts[-1:]
            for pair in start.settings.items()])}
    title = svg.escaped(record.name)
    answers = '\n'.join(
        f'<h2>{question}</h2>\n'
        f'{answer or _paragraphs(["Nothing was recorded."])}'
        for question, answer in sections.items())
    with written_whole(path) as file:
        file.write(
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width">\n'
            f'<title>{title}</title>\n<style>{_STYLE}</style></head>\n'
            f'<body><h1>{title}</h1>\n{answers}\n</body></html>\n')


def _curves(record: RunRecord) -> str:
    """A figure for each quantity, a line for each place that reports it."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list))
    for point in record.curves:
        for name, value in point.values.items():
            series[name.rsplit('/', 1)[-1]][name].append(
                (point.iteration, value))
    return ''.join(_wide(svg.lines(name, series[name])) for name in sorted(
        series, key=lambda name: (name != 'loss', name != 'accuracy', name)))


def _phases(ranks: dict[str, list[RankInterval]]) -> str:
    """Mean time of an update by rank: a figure, and the same as a table."""
    rows = {}
    for name, its in ranks.items():
        rows[name, its[0].rank, False] = mean_of(its, 'phases')
        if hidden := mean_of(its, 'hidden'):    # of the exchange's thread
            rows[f'{name}, beside', its[0].rank, True] = hidden
    used = [phase for phase in PHASES
            if any(found.get(phase) for found in rows.values())]
    events = [Event(rank, phase, end - found.get(phase, 0.0), end,
                    beside=beside)
              for (_, rank, beside), found in rows.items()
              for phase, end in zip(used, accumulate(
                  found.get(phase, 0.0) for phase in used), strict=True)]
    return _wide(svg.timeline(
        'Mean time of an update by rank', events)) + _table([
            (name, seconds(sum(found.values())), *(
                seconds(found.get(phase, 0.0)) for phase in used))
            for (name, *_), found in rows.items()], ('', 'all', *used))


def _timeline(record: RunRecord, path: str) -> str:
    """A recorded update whose time is usual, and a file of it."""
    by_time = sorted(record.updates, key=lambda one: one.seconds)
    if not by_time:
        return ''
    update = by_time[(len(by_time) - 1) // 2]
    with written_whole(path) as file:
        json.dump(svg.chrome_trace(update.events), file)
    return _wide(svg.timeline(
        f'Update {update.iteration}, a usual one of {len(by_time)} recorded',
        update.events)) + _paragraphs(
            [f'{os.path.basename(path)} has it for ui.perfetto.dev.'])


def _paragraphs(texts: Iterable[str]) -> str:
    return ''.join(f'<p>{svg.escaped(text)}</p>\n' for text in texts)


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>\n' if content else ''


def _table(lines: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table; '' without lines."""
    def row(cells: Sequence[str], tag: str) -> str:
        return '<tr>' + ''.join(f'<{tag}>{svg.escaped(cell)}</{tag}>'
                                for cell in cells) + '</tr>\n'
    body = ''.join(row(line, 'td') for line in lines)
    return _wide(f'<table><thead>{row(header, "th")}</thead>{body}</table>'
                 if body else '')


def main(arguments: Sequence[str]) -> None:
    """Runs the command with the arguments that follow its name."""
    parser = Parser(prog='python -m chainer_fp8pipe report',
                    description=_DESCRIPTION)
    parser.add_argument('folder', metavar='FOLDER',
                        help='result folder of a run')
    folder = parser.parse_args(arguments).folder
    path = os.path.join(folder, 'report.html')
    try:
        record = read_record(folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):    # paths may be no UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    print(text(record))
    try:
        write_page(record, path)
    except OSError as error:
        parser.error(f'{path} cannot be written: {reason(error)}; free it, or '
                     'copy the folder')
    print(f'page: {path}')
