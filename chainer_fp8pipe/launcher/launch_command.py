"""``python -m chainer_fp8pipe launch``: starts a job again when it dies."""
# Progress is a first update after that of the start before: whoever has taken
# the snapshot, it was worth another start.  Hosts that are away are no failure
# of the job's: they are asked again and again for a given time.
from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from signal import Signals

from ..command_line import Parser, count
from ..report.launch_protocol import EARLIER, LAUNCHED
from ..report.quantities import columns, counted
from ..report.quantities import seconds as in_words
from .attempt import TICK, USAGE, Ending, noted_signals, run_job, say, show
from .hosts import away, find_starter, read_hosts

_SAME = 3       # starts in a row with the same failure of the script
#: Seconds between starts at most, between two questions to hosts, and until
#: all of them must answer.
_LONGEST, _ASK, _HOSTS = 300.0, 2.0, 3600.0
#: A code above is that of a shell or of a signal.
_LAST_CODE = 125

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
these that have failed in the same way, or where a command line is refused.
The pauses between them grow up to 5 minutes.  The job gets the launcher's
SIGINT and SIGTERM, and is killed 30 seconds later, or by a second signal.
"""


def main(arguments: Sequence[str],
         environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command with the arguments after ``launch``; its exit code."""
    parser = _parser(environment)
    own, of_run = divide(parser, arguments)
    options = parser.parse_args(own, argparse.Namespace(
        environment=environment, program=[
            sys.executable, '-m', 'chainer_fp8pipe', 'run', *of_run]))
    try:
        options.starter = find_starter(environment)
        options.hosts = (read_hosts(options.hostfile)
                         if options.hostfile else [])
        if not of_run:
            raise ValueError('there is no script; name it after the options')
    except ValueError as error:
        parser.error(str(error))
    if options.starter.family == 'MPICH':       # JobOutput reads them
        options.starter.words.append('-print-all-exitcodes')
    with noted_signals() as received:
        return _supervise(options, received)


def divide(parser: Parser, arguments: Sequence[str]
           ) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher's options, which come first, and the words for ``run``."""
    place, known = 0, parser._option_string_actions
    while place < len(arguments):
        name, equals, _ = arguments[place].partition('=')
        if name not in known and name[:2] not in known:     # as in -n8
            break
        place += 1 if (equals or name not in known
                       or known[name].nargs == 0) else 2
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
        '--hostfile', metavar='HOSTS', default='', help="the starter's own "
        'file with a host a line: "name:4" for MPICH, "name slots=4" for Open '
        "MPI (default: this machine, or the allocation of Slurm's)")
    parser.add_argument(
        '--restarts', metavar='N', type=count, default=20, help='starts in a '
        'row from the same place before it gives up (default: 20)')
    return parser


# --- one start after the other -----------------------------------------------

def _supervise(job: argparse.Namespace, received: Sequence[Signals]) -> int:
    """Runs a job to its end, however often it dies; returns the exit code.

    That is 0 once the job has ended so; 128 and the number of the signal that
    has ended it; or else the code of its last start, or 1.
    """
    ended: list[Ending] = []
    token, end = secrets.token_hex(16), ''
    while not end:
        if not _wait_for_hosts(job, received):
            end = ('gives up: hosts have not answered; take them out of the '
                   'file')
        elif not received:
            ended.append(_start(job, ended, token, received))
            end = verdict(ended, job.restarts)
        if received and (not ended or ended[-1].code):
            say(f'ended by {received[-1].name}')
            return 128 + received[-1]
        if not end and (wait := pause_after(ended)):
            say(f'starts again in {in_words(wait)}')
            _wait(wait, received)
    code = ended[-1].code if ended else 1
    if code or ended[1:]:
        say(end)
    if ended[1:]:
        show(table(ended).encode(errors='replace'))
    return code if 0 <= code <= _LAST_CODE else 1


def _wait_for_hosts(job: argparse.Namespace, received: Sequence[Signals]
                    ) -> bool:
    """Whether all answer, before the time is over or a signal comes."""
    end, said = time.monotonic() + _HOSTS, ['']
    while found := away(job.hosts):
        if found != said:
            say(f'without an answer: {", ".join(found)}; asking again')
        if received or time.monotonic() >= end:
            return False
        said = found
        _wait(_ASK, received)
    return True


def _wait(seconds: float, received: Sequence[Signals]) -> None:
    end = time.monotonic() + seconds
    while not received and time.monotonic() < end:
        time.sleep(TICK)


def _start(job: argparse.Namespace, before: Sequence[Ending], token: str,
           received: Sequence[Signals]) -> Ending:
    number = len(before) + 1
    say(f'start {number}: {counted(job.ranks, "rank")} by {job.starter.family}'
        )
    environment = {**job.environment, LAUNCHED: token,
                   EARLIER: str(len(before))}
    ending = run_job(
        job.starter.command(job.ranks, job.program, job.hostfile, [
            name for name in environment
            if name.startswith('CHAINER_FP8PIPE_')]),
        environment, f'{LAUNCHED}={token}', job.ranks, bool(job.hosts),
        received)
    if ending.code:
        say(f'start {number} has ended after {in_words(ending.seconds)}'
            + (f', at update {ending.updates[-1]} or later'
               if ending.updates else '') + f': {ending.cause}')
    return ending


def verdict(ended: Sequence[Ending], restarts: int) -> str:
    """Why there is no other start; '' if there may be one.

    ``restarts`` from the same place may follow each other at most.
    """
    last, tries = ended[-1], _from_the_same_place(ended)
    if not last.code:
        return f'done, after {len(ended)} starts'
    if last.failure and last.code == USAGE and not last.updates:
        return ('gives up: the command line or the script is refused, which '
                'another start does not change')
    if last.failure and tries >= _SAME and all(
            one.failure == last.failure for one in ended[-_SAME:]):
        return (f'gives up: {_SAME} starts in a row have failed in the same '
                'way, without progress')
    return (f'gives up: {tries} starts in a row have made no progress '
            f'(--restarts {restarts})') if tries >= restarts else ''


def pause_after(ended: Sequence[Ending]) -> float:
    """Seconds to wait before the next start: 0, 1, 2, 4 ..."""
    tries = _from_the_same_place(ended)
    return min(2.0 ** min(tries - 2, 30), _LONGEST) if tries > 1 else 0.0


def _from_the_same_place(ended: Sequence[Ending]) -> int:
    """How many starts, up to the last, have begun no further than others."""
    count, first = 0, -1
    for one in ended:
        if one.updates and one.updates[0] > first:
            count, first = 0, one.updates[0]
        count += 1
    return count


def table(ended: Sequence[Ending]) -> str:
    """A row for each start, in lines that end with a line feed."""
    rows = columns([('start', 'at', 'updates', 'ran', 'ended by'), *(
        (str(number), time.strftime('%m-%d %H:%M:%S', time.localtime(one.at)),
         f'{one.updates[0]}-{one.updates[-1]}' if one.updates else 'none',
         in_words(one.seconds), one.cause)
        for number, one in enumerate(ended, 1))])
    return ''.join(f'{row}\n' for row in rows)
