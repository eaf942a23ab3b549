"""The hosts of a job, and the programs that start ranks on them."""
# A job has room on hosts: those of a file, of a Slurm allocation, or this one.
# Before each attempt all of them are asked whether they answer, by a probe:
# an ssh port that accepts or refuses (the host's own kernel does either), or a
# command of the user's.  Those that answer share the ranks, so that a file may
# name spare hosts.
#
# What starts ranks is one of three families, known by what they print for
# --version: Hydra (MPICH, Intel MPI), Open MPI, and Slurm's srun.
from __future__ import annotations

import concurrent.futures
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..command_line import reason

#: What tells whether a host answers, by its name.
Probe = Callable[[str], bool]

_SSH = 22
_SECONDS = 5.0          # of a probe
#: Seconds that one of Slurm's commands, or a --version, may take.
_OF_A_COMMAND = 20.0
_AT_ONCE = 64


class Share(NamedTuple):
    """What a host has of a job, or has room for."""

    host: str       # '': this one, as whatever starts ranks does by itself
    ranks: int


def _printed(command: Sequence[str], seconds: float = _OF_A_COMMAND) -> str:
    """What a command prints.

    Raises:
        OSError: It does not run.
        subprocess.SubprocessError: It fails, or takes longer.
    """
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors='replace', check=True, timeout=seconds).stdout


# --- where there is room -----------------------------------------------------

def read_hosts(path: str, ranks: int) -> list[Share]:
    """The hosts in a file of MPICH's or Open MPI's syntax.

    A line is a host's name, or ``name:4``, or ``name slots=4``; ``#`` begins
    a comment.  Without a number each host takes an equal share.

    Args:
        path: Of the file.
        ranks: Of the whole job.

    Raises:
        ValueError: The file cannot be read or understood, names a host
            twice, or has not room for all ranks.
    """
    try:
        with open(path) as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'--hostfile {path}: {reason(error)}') from None
    found: list[tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        text = line.partition('#')[0].strip()
        match = re.fullmatch(
            r'([\w.-]+)(?::(\d+)|\s+(?:.*\s)?slots\s*=\s*(\d+)(?:\s.*)?)?',
            text)
        count = match and (match[2] or match[3])
        if match and (count is None or int(count)):
            found.append((match[1], int(count or 0)))
        elif text:
            raise ValueError(
                f'--hostfile {path}, line {number}: {text!r} ' + (
                    'has no room for a rank; leave the line out' if match else
                    'is neither NAME, NAME:4 nor NAME slots=4'))
    return _filled(found, ranks, f'--hostfile {path}')


def slurm_hosts(environment: Mapping[str, str], ranks: int) -> list[Share]:
    """The hosts of the Slurm allocation that this process runs in.

    Raises:
        ValueError: ``scontrol`` does not name them, or they have not room.
    """
    try:
        names = _printed(['scontrol', 'show', 'hostnames',
                          environment.get('SLURM_JOB_NODELIST', '')]).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f'scontrol does not name the hosts: {error}'
                         ) from None
    counts: list[int] = []
    for count, times in re.findall(
            r'(\d+)(?:\(x(\d+)\))?',
            environment.get('SLURM_TASKS_PER_NODE', '')):
        counts += [int(count)] * int(times or 1)
    if len(counts) != len(names) or sum(counts) < ranks:
        counts = [0] * len(names)       # of an allocation by CPUs
    return _filled(list(zip(names, counts, strict=True)), ranks,
                   'the allocation of Slurm')


def _filled(found: Sequence[tuple[str, int]], ranks: int, where: str
            ) -> list[Share]:
    names = [name for name, _ in found]
    if not names:
        raise ValueError(f'{where} names no host')
    if twice := next((name for name in names if names.count(name) > 1), ''):
        raise ValueError(f'{where} names {twice} twice')
    equal = -(-ranks // len(names))
    shares = [Share(name, count or equal) for name, count in found]
    if (room := sum(share.ranks for share in shares)) < ranks:
        raise ValueError(f'{where} has room for {room} ranks, not for {ranks}')
    return shares


def check_names(hosts: Sequence[Share], where: str) -> None:
    """Raises ValueError about a host's name that has no address.

    For when a job starts for the first time: later a name may be unknown as
    long as its host is away.
    """
    for host, _ in hosts:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ValueError(f'{where}: {host} has no address ({error}); '
                             'correct the name, or give --probe') from None


def lay_out(room: Sequence[Share], ranks: int) -> list[Share] | None:
    """Gives hosts that have room their ranks, in their order.

    None: there is not enough room.
    """
    shares, left = [], ranks
    for host, most in room:
        if count := min(most, left):
            shares.append(Share(host, count))
            left -= count
    return None if left else shares


# --- whether hosts answer ----------------------------------------------------

def probe_for(command: str | None) -> Probe:
    """A probe that runs a command, in which ``{}`` is the host's name.

    The host answers if the command ends with exit code 0 in time.  None: if
    its ssh port accepts or refuses a connection; its kernel does either.
    """
    def runs(host: str) -> bool:
        try:
            _printed([word.replace('{}', host)
                      for word in shlex.split(command or '')], 2 * _SECONDS)
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def connects(host: str) -> bool:
        try:
            socket.create_connection((host, _SSH), _SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True
    return runs if command else connects


def answering(room: Sequence[Share], ranks: int, probe: Probe
              ) -> tuple[list[Share] | None, str]:
    """What each host that answers gets of a job; all are asked at once.

    Args:
        room: How many ranks each host may have.
        ranks: Of the job.
        probe: Tells whether a host answers.

    Returns:
        The shares, None if too few hosts answer; and what to say of those
        that do not.
    """
    hosts = [share.host for share in room if share.host]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        there = dict(zip(hosts, pool.map(probe, hosts), strict=True))
    away = [host for host in hosts if not there[host]]
    shares = lay_out([share for share in room if share.host not in away],
                     ranks)
    said = '' if not away else (
        'without an answer: ' + ', '.join(away) if away != hosts else
        'no host answers; if they are up, it is the question that they do not '
        'answer (--probe)')
    return shares, said + (
        f'; the others have not room for {ranks} ranks; asking again'
        if shares is None else '')


# --- what starts ranks -------------------------------------------------------

class Starter(NamedTuple):
    """A program that starts ranks.

    Attributes:
        words: Of its command line, such as ``['srun', '--mpi=pmix']``.
        family: ``'MPICH'``, ``'Open MPI'`` or ``'srun'``.
    """

    words: list[str]
    family: str

    def command(self, shares: Sequence[Share], program: Sequence[str],
                variables: Sequence[str]) -> list[str]:
        """The command that runs ``program`` in a job of these shares.

        ``variables`` are names in the environment that all ranks must have,
        on other hosts, too.
        """
        ranks = ['-n', str(sum(share.ranks for share in shares))]
        remote = [share for share in shares if share.host]
        hosts = ','.join(f'{host}:{count}' for host, count in remote)
        if self.family == 'srun':
            # Without the first, others wait for a rank that is dead; without
            # the second, an interrupt asks whether it is meant.
            ranks = ['--kill-on-bad-exit=1', '--quit-on-interrupt', *ranks]
            if remote:
                ranks += [f'--nodes={len(remote)}', '--nodelist=' + ','.join(
                    host for host, _ in remote)]
        elif self.family == 'Open MPI':
            if remote:
                ranks += ['--host', hosts]
                # The others hand the whole environment on.
                for name in variables:
                    ranks += ['-x', name]
        elif remote:
            ranks += ['-hosts', hosts]
        return [*self.words, *ranks, *program]


def find_starter(environment: Mapping[str, str]) -> Starter:
    """The program that starts ranks here.

    It is the one in ``MPIEXEC``; or ``srun`` inside of an allocation of
    Slurm's; or ``mpiexec`` beside the interpreter, or on the path.

    Raises:
        ValueError: There is none, or it is of no family that is known.
    """
    path = environment.get('PATH')
    words = shlex.split(environment.get('MPIEXEC', ''))
    if not words and 'SLURM_JOB_ID' in environment and shutil.which(
            'srun', path=path):
        words = ['srun']
    if not words:
        beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
        found = (beside if os.path.exists(beside) else
                 shutil.which('mpiexec', path=path)
                 or shutil.which('mpirun', path=path))
        if not found:
            raise ValueError(
                'there is no mpiexec beside the interpreter or on the path; '
                "install MPI (pip install 'chainer_fp8pipe[mpich]'), or name "
                'what starts ranks here in MPIEXEC')
        words = [found]
    try:
        said = _printed([*words, '--version'])
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f'{shlex.join(words)} does not run '
                         f'({reason(error)}); correct MPIEXEC') from None
    # In this order: Hydra lists Slurm among what it can work with.
    for family, marks in (('MPICH', ('hydra', 'intel(r) mpi')),
                          ('Open MPI', ('open mpi', 'openrte', 'prrte')),
                          ('srun', ('slurm',))):
        if any(mark in said.lower() for mark in marks):
            return Starter(words, family)
    first = said.strip().partition('\n')[0]
    raise ValueError(
        f'{shlex.join(words)} --version says {first!r}, which is neither '
        "MPICH, Open MPI nor Slurm's srun; name one of them in "
        'MPIEXEC')
