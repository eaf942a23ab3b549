"""The ranks behind whatever a user calls a communicator."""
from __future__ import annotations

from typing import Any


def all_ranks(comm: Any) -> Any:
    """All ranks of a job, as something that can exchange objects.

    Args:
        comm: A communicator of ChainerMN's, whose own ``bcast`` and
            ``allgather`` are for arrays only; a ``ProcessGrid``, of which
            both axes are meant; or the ranks themselves, in mpi4py's
            communicator or in anything else with ``rank`` and ``size``.

    Returns:
        mpi4py's communicator, or what was given if there is none in it.
    """
    return getattr(comm, 'mpi_comm', getattr(comm, 'comm', comm))
