"""Ranks: agreement, failure, grids and groups, waiting."""
from __future__ import annotations

import importlib
from typing import Any


def all_ranks(comm: Any) -> Any:
    """The communicator of all ranks of a job, which exchanges objects.

    mpi4py's in a communicator of ChainerMN's, whose own ``bcast`` and
    ``allgather`` are for arrays only; in a ``ProcessGrid`` that of both axes;
    ``comm`` if there is none in it.
    """
    return getattr(comm, 'mpi_comm', getattr(comm, 'comm', comm))


def end_together(comm: Any) -> None:
    """From now on an exception that nobody catches ends all ranks.

    Where there are any: nothing is done, and MPI not loaded, for a ``comm``
    that is none of mpi4py's.
    """
    if type(all_ranks(comm)).__module__.startswith('mpi4py'):
        importlib.import_module(f'{__name__}.abort').enter_world()
