"""``python -m chainer_fp8pipe report``: its arguments and output."""
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from ..command_line import Parser, reason
from . import page
from .record import read_record
from .verdict import text

_DESCRIPTION = """
Prints a run's verdict, and makes one HTML page about it.  FOLDER is the result
folder of a training (Trainer's out), where an extension records the run, and
makes the same page at its end; this command makes it earlier:

    trainer.extend(chainer_fp8pipe.RunReport(comm))

exit codes: 0; 2: the folder has no record, or one that cannot be read
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command with the arguments that follow its name.

    Raises:
        SystemExit: Help was wanted, or the arguments are wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    path = options.output or os.path.join(options.folder, 'report.html')
    try:
        record = read_record(options.folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):    # paths may be no UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    print(text(record))
    try:
        page.write_page(record, path)
    except OSError as error:
        parser.error(f'{path} cannot be written: {reason(error)}; name '
                     'another file with -o')
    print(f'page: {path}')


def _parser() -> Parser:
    parser = Parser(prog='python -m chainer_fp8pipe report',
                    description=_DESCRIPTION)
    parser.add_argument('folder', metavar='FOLDER',
                        help='result folder of a run')
    parser.add_argument('-o', '--output', metavar='FILE',
                        help='the page (default: FOLDER/report.html)')
    return parser
