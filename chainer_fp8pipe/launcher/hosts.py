"""The hosts of a job, and the programs that start ranks on them."""
# Hosts are those of a file, which is the starter's own, or what starts ranks
# knows them (Slurm's srun, or this machine).  Before each start those of the
# file are asked whether they are up: the ssh port of one accepts or refuses a
# connection, either by its kernel.
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
#: And the option that names a file of hosts.
_HOSTFILE = {'MPICH': '-f', 'Open MPI': '--hostfile', 'srun': '-F'}


def read_hosts(path: str) -> list[str]:
    """The names that lines of a file begin with; ValueError without any."""
    try:
        with open(path) as file:
            names = re.findall(r'^\s*([\w.-]+)', file.read(), re.MULTILINE)
        if names:
            return list(dict.fromkeys(names))
        raise ValueError('names no host')
    except (OSError, ValueError) as error:
        raise ValueError(f'--hostfile {path}: {reason(error)}') from None


def away(hosts: Sequence[str]) -> list[str]:
    """The hosts that do not answer; all are asked at once."""
    with concurrent.futures.ThreadPoolExecutor(len(hosts) or 1) as pool:
        return [host for host, is_up in zip(
            hosts, pool.map(_is_up, hosts), strict=True) if not is_up]


def _is_up(host: str) -> bool:
    try:
        socket.create_connection((host, _SSH), _SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


class Starter(NamedTuple):
    """A program that starts ranks, of one of three families."""

    words: list[str]    # of its command line, as ['srun', '--mpi=pmix']
    family: str         # of _FAMILIES; Hydra is also Intel MPI's

    def command(self, ranks: int, program: Sequence[str], hostfile: str = '',
                variables: Sequence[str] = ()) -> list[str]:
        """The command that runs ``program`` in so many ranks.

        Ranks on other hosts get these variables of the environment, too.
        """
        where = [_HOSTFILE[self.family], hostfile] if hostfile else []
        if self.family == 'srun':
            # Without the first, others wait for a rank that is dead; without
            # the second, an interrupt asks whether it is meant.
            where += ['--kill-on-bad-exit=1', '--quit-on-interrupt']
        elif self.family == 'Open MPI' and hostfile:
            for name in variables:      # the others hand on all that is there
                where += ['-x', name]
        return [*self.words, '-n', str(ranks), *where, *program]


def find_starter(environment: Mapping[str, str]) -> Starter:
    """The program that starts ranks here.

    It is the one in ``MPIEXEC``; or ``srun`` inside of an allocation of
    Slurm's; or ``mpiexec`` beside the interpreter, or on the path.  Raises
    ValueError if there is none, or it is of no family that is known.
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
