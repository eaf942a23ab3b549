"""A process enters its job: is it the rank that its starter meant?

A library that does not speak with the program that has started the ranks
gives each of them a world of its own, rank 0 of 1.  N processes would then
train N times, and nothing would say so.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from mpi4py import MPI

from .abort import abort_on_exception

#: Set: a process that is alone is meant to be.
ALONE = 'CHAINER_FP8PIPE_ALONE'


class _Variables(NamedTuple):
    """By which a starter tells a process its number, and their number."""

    starter: str
    rank: str
    size: str


# The innermost first: the first two start themselves by srun where they can.
_STARTERS = (
    _Variables("Open MPI's mpirun", 'OMPI_COMM_WORLD_RANK',
               'OMPI_COMM_WORLD_SIZE'),
    _Variables("PMI (MPICH's mpiexec, or srun --mpi=pmi2)", 'PMI_RANK',
               'PMI_SIZE'),
    # Not SLURM_NTASKS, which is there in the shell of salloc and in a batch
    # script, too; nor SLURM_PROCID, which is 0 in a batch script.
    _Variables("Slurm's srun", 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'),
)
_MPICH = ('mpiexec of MPICH, which "pip install mpich" puts beside the '
          'interpreter, or with "srun --mpi=pmi2"')
#: What starts ranks, by the library's vendor in mpi4py.
_STARTED_BY = {'Open MPI': 'mpirun of Open MPI, or with "srun --mpi=pmix"'}


class StartError(RuntimeError):
    """Several processes have been started, and MPI says that each is alone."""


def enter_world() -> None:
    """Begins to work as a rank; whatever works on all ranks calls it first.

    From then on an exception that nobody catches ends all ranks.

    Raises:
        StartError: The environment says that this is one of several
            processes, and MPI that it is alone; on each of them.
    """
    if MPI.COMM_WORLD.size == 1:
        if problem := _not_alone(os.environ):
            raise StartError(problem)
        return
    # A process that this one starts has the variables of a rank, but is none.
    os.environ[ALONE] = '1'
    abort_on_exception()


def _not_alone(environment: Mapping[str, str]) -> str:
    """Why a process of a world of 1 is not alone; '' if it is."""
    if environment.get(ALONE, '0') != '0':
        return ''
    starter, rank, size = next(
        (names for names in _STARTERS if names.size in environment),
        _STARTERS[-1])
    count = environment.get(size, '')
    if not count.isdecimal() or int(count) == 1:
        return ''
    # A job that was submitted from a step inherits the step's variables.
    if size.startswith('SLURM') and count != environment.get('SLURM_NTASKS'):
        return ''
    library = MPI.get_vendor()[0]
    return (
        f'{starter} has started {count} processes, of which this one is '
        f'number {environment.get(rank, "?")} ({size}={count}), but {library}'
        f' says that it is alone, rank 0 of 1: all {count} would do the whole '
        'work, each for itself.  Start them with '
        f'{_STARTED_BY.get(library, _MPICH)}; or have mpi4py load the MPI of '
        f'what has started them (MPI4PY_LIBMPI); or, if each is to be alone, '
        f'set {ALONE}=1')
