"""The cores that ranks may use, and those that ranks have in common."""
from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from mpi4py import MPI

#: Differs between machines, and is the same in all containers and network
#: namespaces of a machine, which have host names of their own.
_BOOT = '/proc/sys/kernel/random/boot_id'
#: How many ranks of the job a launcher has started on this machine.
_LOCAL_RANKS = ('MPI_LOCALNRANKS', 'OMPI_COMM_WORLD_LOCAL_SIZE',
                'SLURM_NTASKS_PER_NODE')

Cores = frozenset[tuple[str, int]]


def own_cores() -> Cores:
    """The cores that this process may use, with the machine's name."""
    try:
        with open(_BOOT) as file:
            machine = file.read().strip()
    except OSError:                     # not Linux
        machine = socket.gethostname()
    return frozenset((machine, core) for core in core_numbers())


def core_numbers() -> set[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def pools_of(cores: Sequence[Cores]) -> list[int]:
    """The number of each rank's pool, in the order of their first ranks.

    Args:
        cores: Those that each rank may use.  Ranks with some in common are
            in one pool.
    """
    sets: list[Cores] = []
    for mine in cores:
        meets = [other for other in sets if other & mine]
        sets = [*(other for other in sets if other not in meets),
                mine.union(*meets)]
    found = [next(index for index, other in enumerate(sets) if other & mine)
             for mine in cores]
    order = list(dict.fromkeys(found))
    return [order.index(pool) for pool in found]


def cores_each(comm: MPI.Comm) -> int:
    """How many cores there are for this rank alone, at least 1; on all ranks.

    Ranks that may use the same cores share them evenly.  Ranks of the job
    that are not in ``comm`` count where the launcher tells of them.
    """
    every = comm.allgather(own_cores())
    pools = pools_of(every)
    mine = [cores for cores, pool in zip(every, pools, strict=True)
            if pool == pools[comm.rank]]
    share = len(frozenset().union(*mine)) // len(mine)
    here = max((int(os.environ[name]) for name in _LOCAL_RANKS
                if os.environ.get(name, '').isdigit()), default=1)
    return max(1, min(share, (os.cpu_count() or 1) // max(here, 1)))
