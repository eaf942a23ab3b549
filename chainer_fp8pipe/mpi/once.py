"""What is made once for a communicator and kept with it.

MPI libraries have room for some 2,000 communicators, and a search over
hyperparameters makes more pipelines than that on the same ranks.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

# Duplicates of a communicator do not inherit it.
_KEPT = MPI.Comm.Create_keyval()


def once(comm: MPI.Comm, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gave when it was first asked for under this name.

    If ``make`` is collective, so is the first call.
    """
    kept: Any = comm.Get_attr(_KEPT)
    if kept is None:
        kept = {}
        comm.Set_attr(_KEPT, kept)
    if name not in kept:
        kept[name] = make()
    return kept[name]


def free(comm: MPI.Comm) -> None:
    """Frees what was kept and has something to free; on all ranks."""
    kept: Any = comm.Get_attr(_KEPT) or {}
    for value in kept.values():
        if hasattr(value, 'free'):
            value.free()
