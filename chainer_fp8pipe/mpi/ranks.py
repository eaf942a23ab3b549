"""Objects kept with a communicator; nodes and cores; MPI for compiled code."""
from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from mpi4py import MPI
from threadpoolctl import threadpool_limits


def _free_communicators(comm: Any, key: int, kept: dict[Hashable, Any]
                        ) -> None:
    for value in kept.values():
        if hasattr(value, 'Free'):
            value.Free()


# Duplicates of a communicator do not inherit it.
_KEPT = MPI.Comm.Create_keyval(delete_fn=_free_communicators)


def kept_with(comm: MPI.Comm) -> dict[Hashable, Any]:
    """By name; what has ``Free()`` is freed with this communicator."""
    kept: Any = comm.Get_attr(_KEPT)
    if kept is None:
        kept = {}
        comm.Set_attr(_KEPT, kept)
    return kept


def once(comm: MPI.Comm, name: Hashable, make: Callable[[], Any]) -> Any:
    """The object of this name that is kept; the first call makes it.

    MPI has room for some 2,000 communicators: a search needs more pipelines.
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


#: How many ranks of the job a launcher has started on this machine.
_LOCAL_RANKS = ('MPI_LOCALNRANKS', 'OMPI_COMM_WORLD_LOCAL_SIZE',
                'SLURM_NTASKS_PER_NODE')

#: Each lets a user choose the threads of BLAS.
_THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS',
            'BLIS_NUM_THREADS')


def nodes_of(comm: MPI.Comm) -> list[int]:
    """The first rank of each rank's node."""
    sharing = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    first = sharing.bcast(comm.rank)
    sharing.Free()
    return comm.allgather(first)


def machine_name() -> str:
    """Equal in all processes of a machine, whatever containers they are in."""
    try:
        with open('/proc/sys/kernel/random/boot_id') as file:
            return file.read().strip()
    except OSError:                     # not Linux
        return socket.gethostname()


def own_cores() -> int:
    """Those it may use, or its share of the machine's if that is less."""
    every = os.cpu_count() or 1
    usable = (len(os.sched_getaffinity(0))
              if hasattr(os, 'sched_getaffinity') else every)
    here = max((int(os.environ[name]) for name in _LOCAL_RANKS
                if os.environ.get(name, '').isdigit()), default=1)
    return max(1, min(usable, every // max(here, 1)))


@functools.cache
def share_cores() -> None:
    """Gives BLAS the cores of this rank, where no user has said how many."""
    if not any(os.environ.get(name) for name in _THREADS):
        threadpool_limits(own_cores(), 'blas')


# --- for compiled code -------------------------------------------------------

#: The function that sends; tests set one that never buffers.
SEND = 'MPI_Isend'


class Library(NamedTuple):
    """What compiled code calls MPI with."""

    #: Addresses of ``MPI_Isend``, ``MPI_Irecv`` and ``MPI_Testsome``.
    functions: tuple[int, int, int]
    sizes: tuple[int, int]      # bytes of a request's handle and of a status
    byte: int                   # the handle of MPI_BYTE


def library() -> Library:
    """Finds the functions and sizes of the MPI that mpi4py has loaded."""
    return Library(
        (_address(SEND), _address('MPI_Irecv'), _address('MPI_Testsome')),
        (MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)),
        handle(MPI.BYTE))


def handle(of: MPI.Comm | MPI.Datatype) -> int:
    """A handle, in C a pointer or an int, as a number."""
    size = MPI._sizeof(of)
    return int.from_bytes(
        ctypes.string_at(MPI._addressof(of), size), sys.byteorder,
        signed=size == ctypes.sizeof(ctypes.c_int))     # as a caller has it


@functools.cache
def _address(name: str) -> int:
    # From the libraries that mpi4py was linked with.
    return ctypes.cast(getattr(ctypes.CDLL(MPI.__file__), name),
                       ctypes.c_void_p).value or 0
