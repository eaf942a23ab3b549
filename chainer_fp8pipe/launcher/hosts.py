"""The hosts of a job: who is there, and how many ranks each gets."""
from __future__ import annotations

import concurrent.futures
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

#: What tells whether a host answers, by its name.
Probe = Callable[[str], bool]

_PORT = 22
_SECONDS = 5.0
_AT_ONCE = 64


class Share(NamedTuple):
    """What a host has of a job, or has room for."""

    host: str       # '': this one, as whatever starts ranks does by itself
    ranks: int


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
        raise ValueError(f'--hostfile {path}: {error}') from None
    found: list[tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        text = line.partition('#')[0].strip()
        match = re.fullmatch(
            r'([\w.-]+)(?::(\d+)|\s+(?:.*\s)?slots\s*=\s*(\d+)(?:\s.*)?)?',
            text)
        if match:
            found.append((match[1], int(match[2] or match[3] or 0)))
        elif text:
            raise ValueError(f'--hostfile {path}, line {number}: {text!r} is '
                             'neither NAME, NAME:4 nor NAME slots=4')
    return _filled(found, ranks, f'--hostfile {path}')


def slurm_hosts(environment: Mapping[str, str], ranks: int) -> list[Share]:
    """The hosts of the Slurm allocation that this process runs in.

    Raises:
        ValueError: ``scontrol`` does not name them, or they have not room.
    """
    command = ['scontrol', 'show', 'hostnames',
               environment.get('SLURM_JOB_NODELIST', '')]
    try:
        names = subprocess.run(
            command, capture_output=True, text=True, check=True,
            timeout=4 * _SECONDS).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"the allocation's hosts are not known: "
                         f'{shlex.join(command)}: {error}') from None
    counts: list[int] = []
    for count, times in re.findall(
            r'(\d+)(?:\(x(\d+)\))?',
            environment.get('SLURM_TASKS_PER_NODE', '')):
        counts += [int(count)] * int(times or 1)
    if len(counts) != len(names) or sum(counts) < ranks:
        counts = [0] * len(names)       # of an allocation by CPUs
    return _filled(list(zip(names, counts, strict=True)), ranks,
                   'the allocation of Slurm')


def allocation_probe(environment: Mapping[str, str]) -> Probe:
    """A probe of hosts in the Slurm allocation that this process runs in.

    A host answers if it is up and still in the allocation: with ``sbatch
    --no-kill`` a node that has failed leaves it, and never comes back.
    """
    def answers(host: str) -> bool:
        return tcp_answers(host) and _is_allocated(
            host, environment.get('SLURM_JOB_ID', ''))
    return answers


def _is_allocated(host: str, job: str) -> bool:
    try:
        return bool(subprocess.run(
            ['squeue', '--noheader', f'--jobs={job}', f'--nodelist={host}',
             '--format=%i'], stdin=subprocess.DEVNULL, capture_output=True,
            check=True, timeout=4 * _SECONDS).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return True         # Slurm does not say


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


def lay_out(room: Sequence[Share], ranks: int, multiple: int = 1
            ) -> list[Share]:
    """Gives up to ``ranks`` ranks to hosts that have room, in their order.

    Their sum is a multiple of ``multiple``, the ranks of a pipeline.
    """
    left = min(ranks, sum(share.ranks for share in room))
    left -= left % multiple
    shares = []
    for host, most in room:
        if count := min(most, left):
            shares.append(Share(host, count))
            left -= count
    return shares


def tcp_answers(host: str, port: int = _PORT, seconds: float = _SECONDS
                ) -> bool:
    """Whether a host is up: it accepts or refuses a connection in time."""
    try:
        socket.create_connection((host, port), seconds).close()
    except ConnectionRefusedError:
        return True         # by the host's own kernel
    except OSError:
        return False
    return True


def command_probe(command: str, seconds: float = 2 * _SECONDS) -> Probe:
    """A probe that runs a command, in which ``{}`` is the host's name.

    The host answers if the command ends with exit code 0 in time.
    """
    def answers(host: str) -> bool:
        words = [word.replace('{}', host) for word in shlex.split(command)]
        try:
            return not subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=seconds).returncode
        except (OSError, subprocess.TimeoutExpired):
            return False
    return answers


def answering(hosts: Collection[str], probe: Probe) -> set[str]:
    """Those of the hosts that answer; all are asked at once."""
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return {host for host, answers
                in zip(hosts, pool.map(probe, hosts), strict=True) if answers}
