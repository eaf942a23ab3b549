"""The hosts of a job, and the programs that start ranks on them."""
# Hosts are those of a file, or what starts ranks knows them (Slurm's srun, or
# this machine).  Before each start those of the file are asked whether they
# are up: the ssh port of one accepts or refuses a connection, either by its
# kernel.  Those that are up share the ranks: a file may name spare hosts.
from __future__ import annotations

import concurrent.futures
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..command_line import reason

_SSH = 22
_SECONDS = 5.0          # for an answer
_VERSION = 20.0         # seconds that a --version may take
#: By family, what is in the small letters of its --version.  In this order:
#: Hydra lists Slurm among what it can work with.
_FAMILIES = {'MPICH': ('hydra', 'intel(r) mpi'),
             'Open MPI': ('open mpi', 'openrte', 'prrte'),
             'srun': ('slurm',)}


def read_hosts(path: str, ranks: int) -> dict[str, int]:
    """How many ranks each host in a file may have, in the file's order.

    A line is a host's name, or ``name:4``, or ``name slots=4``; ``#`` begins
    a comment.  Without a number each host takes an equal share.

    Args:
        path: Of the file.
        ranks: Of the whole job.

    Raises:
        ValueError: The file cannot be read or understood, names a host twice
            or one that has no address, or has not room for all ranks.
    """
    where = f'--hostfile {path}'
    try:
        with open(path) as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{where}: {reason(error)}') from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(
            r'([\w.-]+)(?:(?::|\s+slots\s*=\s*)0*([1-9]\d*))?', line)
        try:
            if match and match[1] not in found:
                found[match[1]] = int(match[2] or 0)
                socket.getaddrinfo(match[1], None)
            elif line:
                raise ValueError('is named twice' if match else
                                 'is neither NAME, NAME:4 nor NAME slots=4')
        except (OSError, ValueError) as error:
            raise ValueError(f'{where}, line {number}: {line!r} ' + (
                str(error) if type(error) is ValueError else
                f'has no address ({reason(error)})')) from None
    hosts = {name: count or -(-ranks // len(found))
             for name, count in found.items()}
    if (room := sum(hosts.values())) < ranks:
        raise ValueError(f'{where} has room for {room} ranks, not for {ranks}')
    return hosts


def answering(hosts: Mapping[str, int], ranks: int
              ) -> tuple[dict[str, int] | None, list[str]]:
    """What each host that is up gets of a job; all are asked at once.

    Args:
        hosts: How many ranks each may have.
        ranks: Of the job.

    Returns:
        The ranks of hosts, None if too few are up; and who is not.
    """
    shares: dict[str, int] = {}
    away, left = [], ranks
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        for (host, most), is_up in zip(
                hosts.items(), pool.map(_is_up, hosts), strict=True):
            if not is_up:
                away.append(host)
            elif left:
                shares[host] = min(most, left)
                left -= shares[host]
    return None if left else shares, away


def _is_up(host: str) -> bool:
    try:
        socket.create_connection((host, _SSH), _SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


class Starter(NamedTuple):
    """A program that starts ranks, of one of three families.

    Hydra is that of MPICH and Intel MPI; the others are Open MPI's and Slurm's
    srun.
    """

    words: list[str]    # of its command line, as ['srun', '--mpi=pmix']
    family: str         # of _FAMILIES

    def command(self, ranks: int, program: Sequence[str],
                hosts: Mapping[str, int] | None = None,
                variables: Sequence[str] = ()) -> list[str]:
        """The command that runs ``program`` in so many ranks.

        Args:
            ranks: Their number.
            program: The command line of each rank.
            hosts: The ranks of each host; none: where the starter says.
            variables: Of the environment, for ranks on other hosts, too.
        """
        words, names = [*self.words, '-n', str(ranks)], ','.join(
            f'{host}:{count}' for host, count in (hosts or {}).items())
        if self.family == 'srun':
            # Without the first, others wait for a rank that is dead; without
            # the second, an interrupt asks whether it is meant.
            words += ['--kill-on-bad-exit=1', '--quit-on-interrupt']
            if hosts:
                words += [f'--nodes={len(hosts)}',
                          f'--nodelist={",".join(hosts)}']
        elif hosts and self.family == 'Open MPI':
            words += ['--host', names]
            for name in variables:      # the others hand on all that is there
                words += ['-x', name]
        elif hosts:
            words += ['-hosts', names]
        return [*words, *program]


def find_starter(environment: Mapping[str, str]) -> Starter:
    """The program that starts ranks here.

    It is the one in ``MPIEXEC``; or ``srun`` inside of an allocation of
    Slurm's; or ``mpiexec`` beside the interpreter, or on the path.

    Raises:
        ValueError: There is none, or it is of no family that is known.
    """
    path = environment.get('PATH')
    beside = os.path.dirname(sys.executable)
    words = shlex.split(environment.get('MPIEXEC', '')) or [
        'SLURM_JOB_ID' in environment and shutil.which('srun', path=path)
        or shutil.which('mpiexec', path=beside)
        or shutil.which('mpiexec', path=path)
        or shutil.which('mpirun', path=path) or '']
    if words == ['']:
        raise ValueError(
            'there is no mpiexec beside the interpreter or on the path; '
            "install MPI (pip install 'chainer_fp8pipe[mpich]'), or name "
            'what starts ranks here in MPIEXEC')
    try:
        said = subprocess.run(
            [*words, '--version'], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors='replace', check=True,
            timeout=_VERSION).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f'{shlex.join(words)} does not run '
                         f'({reason(error)}); correct MPIEXEC') from None
    for family, marks in _FAMILIES.items():
        if any(mark in said.lower() for mark in marks):
            return Starter(words, family)
    raise ValueError(
        f'{shlex.join(words)} --version says {said.strip()[:60]!r}'
        ", which is neither MPICH, Open MPI nor Slurm's srun; name one of "
        'them in MPIEXEC')
