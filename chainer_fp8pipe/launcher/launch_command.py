"""``python -m chainer_fp8pipe launch``: its arguments."""
from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence

from ..command_line import (
    Parser,
    check_script,
    count,
    did_you_mean,
    parse_interval,
)
from ..report.launch_protocol import LAUNCHED
from .attempt import Interrupts
from .hosts import (
    Share,
    check_names,
    find_starter,
    probe_for,
    read_hosts,
    slurm_hosts,
)
from .leftovers import Guard
from .supervisor import LaunchedJob, Supervisor

#: Tells ranks after how many seconds without an update they are stalled.
STALL = 'CHAINER_FP8PIPE_STALL'

_USAGE = ('python -m chainer_fp8pipe launch -n N [OPTIONS] [OPTIONS OF RUN] '
          'SCRIPT [ARGS]')
_DESCRIPTION = """
Runs a script as "run" does, and starts it again from its newest whole
snapshot when it dies:

    python -m chainer_fp8pipe launch -n 8 --snapshots saved --every 5m \\
        --communicator fp8 train.py --epoch 90

Call it without mpiexec, which it starts itself: the program in the
environment variable MPIEXEC, else srun inside of an allocation of Slurm's,
else the mpiexec beside the interpreter or on the path.  All other options are
those of "run" (python -m chainer_fp8pipe run --help).  Words after SCRIPT are
the script's.

--snapshots gives snapshots to a script that has none: each start goes on from
the newest one.  Without --snapshots the script must do so itself.

It gives up after --restarts starts in a row without progress, after 3 in a row
that have failed in the same way (2 before the first update), where a command
line is refused, or when too few hosts have answered for --wait-for-hosts.  The
job gets the launcher's SIGINT and SIGTERM, and time to heed them; a second
signal kills it.  Between starts without progress are pauses: 0, 1, 2, 4
seconds and so on, up to 5 minutes.
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
    flags = _flags(parser)
    own, of_run, script = split_arguments(arguments, flags)
    for word in of_run:
        if meant := mistyped(word.partition('=')[0], flags):
            parser.error(f'there is no option {word}{meant}')
    options = parser.parse_args(own)
    if of_run and not script:
        parser.error(
            f'there is no script after the options: {of_run[-1]} is taken '
            f'for the value of {of_run[-2]}' if of_run[1:] else
            f'there is no script after the option {of_run[0]}')
    with Interrupts() as interrupts:
        try:
            job = _job(options, of_run, script, environment)
        except ValueError as error:
            parser.error(str(error))
        token = secrets.token_hex(16)
        guard = Guard(f'{LAUNCHED}={token}')
        try:
            return Supervisor(job, token, interrupts).run()
        except OSError as error:
            print(f'chainer_fp8pipe launch: {error}', file=sys.stderr)
            return 1
        finally:
            guard.dismiss()


def mistyped(word: str, own: Collection[str]) -> str:
    """``'; did you mean --snapshots?'``; '' if no option of the launcher's is.

    An abbreviation, too: it would be handed on to ``run``, and mean something
    else there, or be refused on every rank.
    """
    if word[:2] != '--' or word in own:
        return ''
    longer = [name for name in sorted(own) if name.startswith(word)]
    return (did_you_mean(word, longer[:1], 0.0)
            or did_you_mean(word, own, 0.85))


#: Options of ``run`` without a value.
FLAGS_OF_RUN = '--cpu',


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
        'as "name:4" or "name slots=4" (default: the hosts of the allocation '
        'of Slurm\'s, or this one)')
    parser.add_argument(
        '--restarts', metavar='N', type=_count_or_0, default=20, help='starts '
        'in a row without progress before it gives up (default: 20)')
    parser.add_argument(
        '--wait-for-hosts', metavar='TIME', type=_time, help='time until '
        'enough of them for all ranks answer: 90s, 10m, 1h (default: 1h)')
    parser.add_argument(
        '--snapshots', metavar='DIR', help='directory for snapshots of '
        'the whole job; a start goes on from the newest one')
    parser.add_argument(
        '--every', metavar='INTERVAL',
        type=lambda text: parse_interval(text) and text, help='between '
        "snapshots: 30s, 5m, 1h, '100 iterations', '1 epoch' (default: 5m)")
    parser.add_argument(
        '--stall', metavar='SECONDS', type=_seconds, help='time without '
        'an update after which a job is ended and started again; 0: never '
        '(default: from the time of an update)')
    parser.add_argument(
        '--probe', metavar='COMMAND', help='command that ends with 0 if '
        "the host {} answers, such as 'ping -c 1 -W 3 {}' (default: "
        'an answer of port 22 within 5 seconds)')
    return parser


def _job(options: argparse.Namespace, of_run: Sequence[str],
         script: Sequence[str], environment: Mapping[str, str]
         ) -> LaunchedJob:
    """The job; raises ValueError if it cannot be started."""
    check_script(script[0] if script else None)
    if options.every is not None and options.snapshots is None:
        raise ValueError('--every is an option of --snapshots DIR')
    ranks = options.ranks
    stages = _value(of_run, '--pipeline')
    pipeline = int(stages) if stages.isdecimal() else 1
    if pipeline < 1 or ranks % pipeline:
        raise ValueError(f'--pipeline {pipeline} does not divide the {ranks} '
                         'ranks of -n')
    starter, every = find_starter(environment), options.every or '5m'
    if starter.family == 'MPICH':       # JobOutput reads them
        starter = starter._replace(words=[*starter.words,
                                          '-print-all-exitcodes'])
    room = _room(options, environment)
    return LaunchedJob(
        [sys.executable, '-m', 'chainer_fp8pipe', 'run',
         *([] if options.snapshots is None else
           ['--snapshots', options.snapshots, '--every', every]),
         *of_run, *script],
        starter, room, ranks, probe_for(options.probe), options.snapshots,
        every, options.restarts, options.wait_for_hosts or _time('1h'),
        {**environment, **({} if options.stall is None
                           else {STALL: options.stall})})


def _room(options: argparse.Namespace, environment: Mapping[str, str]
          ) -> list[Share]:
    """The hosts; ValueError if they cannot be read, or options need some."""
    room = [Share('', options.ranks)]
    if options.hostfile is not None:
        room = read_hosts(options.hostfile, options.ranks)
        if not options.probe:   # which may know names that others do not
            check_names(room, f'--hostfile {options.hostfile}')
    elif 'SLURM_JOB_NODELIST' in environment:
        with contextlib.suppress(ValueError):
            room = slurm_hosts(environment, options.ranks)
    if not room[0].host:        # this machine, which is not asked
        for name in 'probe', 'wait-for-hosts':
            if getattr(options, name.replace('-', '_')) is not None:
                raise ValueError(f'--{name} is about hosts: add --hostfile')
    return room


def _value(of_run: Sequence[str], name: str) -> str:
    """The last value of one of ``run``'s options; '' if it is not given."""
    value = ''
    for place, word in enumerate(of_run):
        if word.startswith(f'{name}='):
            value = word.partition('=')[2]
        elif word == name:
            value = ''.join(of_run[place + 1:place + 2])
    return value


def _count_or_0(text: str) -> int:
    return 0 if text.isdecimal() and not int(text) else count(text)


def _time(text: str) -> float:
    with contextlib.suppress(argparse.ArgumentTypeError):
        amount, unit = parse_interval(text)
        if unit == 'second':
            return amount
    raise argparse.ArgumentTypeError(
        f'{text!r} is no time; write it as in 90s, 10m or 1h')


def _seconds(text: str) -> str:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return text
    raise argparse.ArgumentTypeError(f'must be at least 0, not {text}')
