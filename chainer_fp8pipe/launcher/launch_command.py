"""``python -m chainer_fp8pipe launch``: its arguments."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ..command_line import Parser, as_type, check_script, count
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

All other options are those of "run" (python -m chainer_fp8pipe run --help).
With --snapshots each start goes on from the newest one; without it the script
must do so itself.

It gives up after --restarts starts in a row from the same place, after 3 of
these that have failed in the same way (2 before the first update), or where a
command line is refused.  Between them are pauses: 0, 1, 2, 4 seconds and so
on, up to 5 minutes.  The job gets the launcher's SIGINT and SIGTERM, and is
killed 30 seconds later, or by a second signal.
"""
#: Options of ``run`` without a value.
FLAGS_OF_RUN = '--cpu',


def main(arguments: Sequence[str],
         environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command with the arguments after ``launch``.

    Returns:
        The exit code.

    Raises:
        SystemExit: The arguments are wrong, or ask for help.
    """
    parser = _parser(environment)
    own, of_run, script = split_arguments(arguments, _flags(parser))
    options = parser.parse_args(own)
    try:
        check_script(script[0] if script else None)
        starter = find_starter(environment)
        hosts = (read_hosts(options.hostfile, options.ranks)
                 if options.hostfile else {})
    except ValueError as error:
        parser.error(str(error))
    if starter.family == 'MPICH':       # JobOutput reads them
        starter.words.append('-print-all-exitcodes')
    with noted_signals() as received:
        try:
            return supervise(LaunchedJob(
                [sys.executable, '-m', 'chainer_fp8pipe', 'run', *of_run,
                 *script], starter, options.ranks, hosts,
                options.wait_for_hosts, options.restarts, environment),
                received)
        except OSError as error:
            print(f'chainer_fp8pipe launch: {error}', file=sys.stderr)
            return 1


def split_arguments(arguments: Sequence[str], own: Mapping[str, bool]
                    ) -> tuple[list[str], list[str], list[str]]:
    """Divides a command line into the launcher's, ``run``'s, the script's.

    Every option of ``run`` but its flags has a value, and so the first word
    that is neither an option nor a value is the script.

    Args:
        arguments: All words.
        own: By the launcher's options, whether they have a value.

    Returns:
        The launcher's options, those of ``run``, and the script with its
        arguments.
    """
    mine: list[str] = []
    of_run: list[str] = []
    words = list(arguments)
    while words and words[0].startswith('-') and words[0] not in ('-', '--'):
        word = words.pop(0)
        name, equals, _ = word.partition('=')
        if name not in own and name[:2] in own and name[1] != '-':
            name, equals = name[:2], '='        # as in -n8
        target = mine if name in own else of_run
        target.append(word)
        if words and not equals and own.get(name, name not in FLAGS_OF_RUN):
            target.append(words.pop(0))
    return mine, of_run, words[words[:1] == ['--']:]


def _flags(parser: argparse.ArgumentParser) -> dict[str, bool]:
    return {name: action.nargs != 0 for action in parser._actions
            for name in action.option_strings}


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
