"""Objects that are kept with a communicator, each made once.

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
    """The object of this name; the first call makes it.

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
    """Calls ``free`` of the objects that have it; on all ranks."""
    kept: Any = comm.Get_attr(_KEPT) or {}
    for value in kept.values():
        if hasattr(value, 'free'):
            value.free()
