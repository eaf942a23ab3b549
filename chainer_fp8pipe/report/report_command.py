"""``python -m chainer_fp8pipe report``: its arguments and output."""
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from ..command_line import Parser, reason
from . import page
from .record import is_record, read_record
from .verdict import text

_DESCRIPTION = """
Prints a run's results, and makes one HTML file about it:

    python -m chainer_fp8pipe report result

The verdict in the terminal has the final loss and accuracy, times, bytes and
restarts.  It names the costliest part of an update.  The page shows
curves, the time of each rank, slow ranks, bytes and memory.

A FOLDER is a training's result folder (Trainer's out).  An extension records
the run there, and makes the same page while it goes on:

    trainer.extend(chainer_fp8pipe.RunReport(comm))

One page compares several folders.  The command needs no ranks: call it
without mpiexec.
"""
_EPILOG = """
exit codes: 0; 2: a folder has no record, or one that cannot be read
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command with the arguments that follow its name.

    Raises:
        SystemExit: Help was wanted, or the arguments are wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    folders = [folder for given in options.folders
               for folder in _runs_in(given)]
    if len({os.path.abspath(folder) for folder in folders}) < len(folders):
        parser.error('a folder is given twice')
    if len(folders) > page.MOST_RUNS:
        parser.error(f'one page compares at most {page.MOST_RUNS} runs, not '
                     f'{len(folders)}; name fewer folders')
    try:
        records = [read_record(folder) for folder in folders]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if len({record.name for record in records}) < len(records):
        for record, folder in zip(records, folders, strict=True):
            record.name = folder
    if isinstance(sys.stdout, io.TextIOWrapper):    # paths may be no UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    for record in records:
        print(text(record))
    path = options.output or (
        os.path.join(folders[0], 'report.html') if len(folders) == 1
        else 'report.html')
    try:
        page.write_page(records, path)
    except OSError as error:
        parser.error(f'{path} cannot be written: {reason(error)}; name '
                     'another file with -o')
    print(f'page: {path}')


def _parser() -> Parser:
    parser = Parser(prog='python -m chainer_fp8pipe report',
                    description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        'folders', nargs='+', metavar='FOLDER',
        help='result folder of a run, or a folder of such folders')
    parser.add_argument(
        '-o', '--output', metavar='FILE',
        help='the page (default: report.html, of one run in its folder)')
    return parser


def _runs_in(folder: str) -> list[str]:
    """The folder, or those in it that have a record if it has none."""
    if is_record(folder) or not os.path.isdir(folder):
        return [folder]
    inside = [os.path.join(folder, name)
              for name in sorted(os.listdir(folder))]
    return [one for one in inside if is_record(one)] or [folder]
