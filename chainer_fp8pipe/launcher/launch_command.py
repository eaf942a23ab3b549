"""``python -m chainer_fp8pipe launch``: its arguments."""
from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ..command_line import Parser, as_type, count
from ..report.quantities import parse_seconds
from .attempt import noted_signals
from .hosts import find_starter, read_hosts
from .supervisor import LaunchedJob, supervise

_USAGE = ('python -m chainer_fp8pipe launch -n N [OPTIONS] [OPTIONS OF RUN] '
          'SCRIPT [ARGS]')
_DESCRIPTION = """
Runs a script as "run" does, and starts it again when it dies:

    python -m chainer_fp8pipe launch -n 8 --snapshots saved --every 5m \\
        --communicator fp8 train.py --epoch 90

Call it without mpiexec, which it starts itself: the program in the
environment variable MPIEXEC, else srun inside of an allocation of Slurm's,
else the mpiexec beside the interpreter or on the path.

All other options follow, and are those of "run" (run --help).  With
--snapshots each start goes on from the newest one; without it the script must
do so itself.

It gives up after --restarts starts in a row from the same place, after 3 of
these that have failed in the same way (2 before the first update), or where a
command line is refused.  Between them are pauses: 0, 1, 2, 4 seconds and so
on, up to 5 minutes.  The job gets the launcher's SIGINT and SIGTERM, and is
killed 30 seconds later, or by a second signal.
"""
def main(arguments: Sequence[str],
         environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command with the arguments after ``launch``.

    Returns:
        The exit code.

    Raises:
        SystemExit: The arguments are wrong, or ask for help.
    """
    parser = _parser(environment)
    own, of_run = divide(parser, arguments)
    options = parser.parse_args(own)
    try:
        starter = find_starter(environment)
        hosts = (read_hosts(options.hostfile, options.ranks)
                 if options.hostfile else {})
    except ValueError as error:
        parser.error(str(error))
    if not of_run:
        parser.error('there is no script; name it after the options')
    if starter.family == 'MPICH':       # JobOutput reads them
        starter.words.append('-print-all-exitcodes')
    with noted_signals() as received:
        try:
            return supervise(LaunchedJob(
                [sys.executable, '-m', 'chainer_fp8pipe', 'run', *of_run],
                starter, options.ranks, hosts, options.wait_for_hosts,
                options.restarts, environment), received)
        except OSError as error:
            print(f'chainer_fp8pipe launch: {error}', file=sys.stderr)
            return 1


def divide(parser: Parser, arguments: Sequence[str]
           ) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher's options, which come first, and the words for ``run``."""
    place, known = 0, parser._option_string_actions
    for number, word in enumerate(arguments):
        name, equals, _ = word.partition('=')
        if number >= place:
            if name in known:
                place += 1 if equals or known[name].nargs == 0 else 2
            elif name[:2] in known:         # as in -n8
                place += 1
            else:
                break
    return arguments[:place], arguments[place:]


def _parser(environment: Mapping[str, str]) -> Parser:
    parser = Parser(prog='python -m chainer_fp8pipe launch', usage=_USAGE,
                    description=_DESCRIPTION)
    ranks = environment.get('SLURM_NTASKS')
    parser.add_argument(
        '-n', '--ranks', metavar='N', type=count, required=ranks is None,
        default=ranks, help='ranks of the job (default in an allocation of '
        "Slurm's: its number of tasks)")
    parser.add_argument(
        '--hostfile', metavar='HOSTS', help='file with a host a line, '
        'as "name:4" or "name slots=4" (default: this one, or those of the '
        "allocation of Slurm's)")
    parser.add_argument(
        '--wait-for-hosts', metavar='SECONDS', type=as_type(parse_seconds),
        default=3600.0, help='until enough of them for all ranks answer at '
        'port 22; the others are left out (default: 3600)')
    parser.add_argument(
        '--restarts', metavar='N', type=count, default=20, help='starts in a '
        'row from the same place before it gives up (default: 20)')
    return parser
