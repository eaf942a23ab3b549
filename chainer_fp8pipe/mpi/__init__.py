"""Ranks: agreement, failure, grids and groups, waiting."""
from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

#: Set: a process that is alone is meant to be.
ALONE = 'CHAINER_FP8PIPE_ALONE'
#: The process that is the rank; what it starts has the variable, too.
RANK_PROCESS = 'CHAINER_FP8PIPE_RANK_PROCESS'
# What starts ranks, and the variables by which it tells a process its number,
# and their number.  The innermost first: the first two start themselves by
# srun where they can.
_STARTERS = (
    ("Open MPI's mpirun", 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
    ("PMI (MPICH's mpiexec, or srun --mpi=pmi2)", 'PMI_RANK', 'PMI_SIZE'),
    # Not SLURM_NTASKS, which is there in the shell of salloc and in a batch
    # script, too; nor SLURM_PROCID, which is 0 in a batch script.
    ("Slurm's srun", 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'),
)


def started_together(environment: Mapping[str, str]
                     ) -> tuple[str, str, int, str] | None:
    """What has started this process as one of several; MPI is not asked.

    And its number, how many there are, and the variable that says so; None
    if it was started by itself.
    """
    starter, rank, size = next(
        (names for names in _STARTERS if names[2] in environment),
        _STARTERS[-1])
    count, own = environment.get(size, ''), str(os.getpid())
    if (environment.get(ALONE, '0') != '0' or not count.isdecimal()
            or int(count) == 1 or environment.get(RANK_PROCESS, own) != own
            # A job submitted from a step inherits the step's variables.
            or size.startswith('SLURM')
            and count != environment.get('SLURM_NTASKS')):
        return None
    return starter, environment.get(rank, '?'), int(count), size


def all_ranks(comm: Any) -> Any:
    """mpi4py's communicator in ChainerMN's or in a grid, or ``comm``."""
    return getattr(comm, 'mpi_comm', getattr(comm, 'comm', comm))


def torus_shape(ranks: int, per_node: int) -> tuple[int, int]:
    """Rows and columns: a row per node of several ranks, or nearly square.

    (1, ranks) is a ring.  ``per_node`` is 0 if nodes differ.
    """
    if 1 < per_node < ranks and ranks % per_node == 0:
        return ranks // per_node, per_node
    rows = max(number for number in divisors(ranks)
               if number <= math.isqrt(ranks))
    return rows, ranks // rows


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    return [divisor for divisor in range(1, number + 1)
            if number % divisor == 0]
