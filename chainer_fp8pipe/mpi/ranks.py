"""Objects that are kept with a communicator; nodes and cores of ranks."""
from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

# --- communicators -----------------------------------------------------------

def _free_communicators(comm: Any, key: int, kept: dict[Hashable, Any]
                        ) -> None:
    for value in kept.values():
        # One in which messages are left stays: a later one would find them.
        if isinstance(value, MPI.Comm) and not any(
                getattr(one, 'problem', '')
                for one in kept_with(value).values()):
            value.Free()


# Duplicates of a communicator do not inherit it.
_KEPT = MPI.Comm.Create_keyval(delete_fn=_free_communicators)


def kept_with(comm: MPI.Comm) -> dict[Hashable, Any]:
    """Objects that are kept with a communicator, by their names.

    Communicators among them are freed with it.
    """
    kept: Any = comm.Get_attr(_KEPT)
    if kept is None:
        kept = {}
        comm.Set_attr(_KEPT, kept)
    return kept


def once(comm: MPI.Comm, name: Hashable, make: Callable[[], Any]) -> Any:
    """The object of this name that is kept; the first call makes it.

    MPI libraries have room for some 2,000 communicators, and a search over
    hyperparameters makes more pipelines than that on the same ranks.  If
    ``make`` is collective, so is the first call.
    """
    kept = kept_with(comm)
    # What was freed, on all ranks, is made anew.
    if name not in kept or getattr(kept[name], 'is_freed', False):
        kept[name] = make()
    return kept[name]


def free_with_kept(comm: MPI.Comm) -> None:
    """Frees a communicator and what is kept with it; on all its ranks."""
    if comm != MPI.COMM_NULL:
        for value in kept_with(comm).values():
            if hasattr(value, 'free') and not isinstance(value, MPI.Comm):
                value.free()
        comm.Free()


# --- nodes and cores ---------------------------------------------------------

#: Differs between machines, and is the same in all containers and network
#: namespaces of a machine, which have host names of their own.
_BOOT = '/proc/sys/kernel/random/boot_id'
#: How many ranks of the job a launcher has started on this machine.
_LOCAL_RANKS = ('MPI_LOCALNRANKS', 'OMPI_COMM_WORLD_LOCAL_SIZE',
                'SLURM_NTASKS_PER_NODE')

#: Each lets a user choose the threads of BLAS.
_THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS',
            'BLIS_NUM_THREADS')

Cores = frozenset[tuple[str, int]]


def nodes_of(comm: MPI.Comm) -> list[int]:
    """The node of each rank, numbered in the order of their first ranks."""
    sharing = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        first = sharing.bcast(comm.rank)
    finally:
        sharing.Free()
    firsts = comm.allgather(first)
    numbering = {of: node for node, of in enumerate(sorted(set(firsts)))}
    return [numbering[of] for of in firsts]


def machine_name() -> str:
    """Equal in all processes of a machine, whatever containers they are in."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:                     # not Linux
        return socket.gethostname()


def own_cores() -> Cores:
    """The cores that this process may use, with the machine's name."""
    machine = machine_name()
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
    pools = list(range(len(cores)))
    for rank, mine in enumerate(cores):
        meets = {pools[other] for other in range(rank)
                 if mine & cores[other]}
        pools = [min(meets) if meets and pool in {*meets, rank} else pool
                 for pool in pools]
    order = list(dict.fromkeys(pools))
    return [order.index(pool) for pool in pools]


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


@functools.cache
def share_cores() -> None:
    """Gives BLAS the cores of this rank, where no user has said how many.

    It would take all cores on every rank, and four ranks on two cores then
    train five times more slowly than with one thread each.
    """
    if not any(os.environ.get(name) for name in _THREADS):
        threadpool_limits(cores_each(MPI.COMM_SELF), 'blas')
