"""The programs that start a job's ranks, and their command lines.

Three families are known, by what they print for ``--version``: Hydra (MPICH,
Intel MPI), Open MPI, and Slurm's ``srun``.
"""
from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .hosts import Share

_SECONDS = 20           # for --version


class Starter(NamedTuple):
    """A program that starts ranks.

    Attributes:
        words: Of its command line, such as ``['srun', '--mpi=pmix']``.
        family: ``'Hydra'``, ``'Open MPI'`` or ``'srun'``.
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
    words = _words(environment)
    return Starter(words, _family(words))


def _words(environment: Mapping[str, str]) -> list[str]:
    if named := shlex.split(environment.get('MPIEXEC', '')):
        return named
    path = environment.get('PATH')
    if 'SLURM_JOB_ID' in environment and shutil.which('srun', path=path):
        return ['srun']
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = (beside if os.path.exists(beside) else
             shutil.which('mpiexec', path=path)
             or shutil.which('mpirun', path=path))
    if not found:
        raise ValueError(
            'there is no mpiexec beside the interpreter or on the path; '
            "install MPI (pip install 'chainer_fp8pipe[mpich]'), or name "
            'what starts ranks here in MPIEXEC')
    return [found]


def _family(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [*words, '--version'], stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors='replace', timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f'{shlex.join(words)} does not run ({error}); '
                           'correct MPIEXEC') from None
    said = done.stdout.lower()
    # In this order: Hydra lists Slurm among what it can work with.
    for family, marks in (('Hydra', ('hydra', 'intel(r) mpi')),
                          ('Open MPI', ('open mpi', 'openrte', 'prrte')),
                          ('srun', ('slurm',))):
        if any(mark in said for mark in marks):
            return family
    first = done.stdout.strip().partition('\n')[0]
    raise ValueError(
        f'{shlex.join(words)} --version says {first!r}, which is neither '
        "MPICH's Hydra, Open MPI nor Slurm's srun; name one of them in "
        'MPIEXEC')
