"""Ranks: agreement, failure, grids and groups, waiting."""
from __future__ import annotations

from typing import Any


def all_ranks(comm: Any) -> Any:
    """The communicator of all ranks of a job, which exchanges objects.

    mpi4py's in a communicator of ChainerMN's, whose own ``bcast`` and
    ``allgather`` are for arrays only; in a ``ProcessGrid`` that of both axes;
    ``comm`` if there is none in it.
    """
    return getattr(comm, 'mpi_comm', getattr(comm, 'comm', comm))
