"""mpi4py's communicator in the several kinds that users have."""
from __future__ import annotations

from typing import Any


def all_ranks(comm: Any) -> Any:
    """The communicator of all ranks of a job, which exchanges objects.

    Args:
        comm: A communicator of ChainerMN's, whose own ``bcast`` and
            ``allgather`` are for arrays only; a ``ProcessGrid``, for both of
            its axes; mpi4py's communicator; or any object with ``rank`` and
            ``size``.

    Returns:
        mpi4py's communicator, or ``comm`` if there is none in it.
    """
    return getattr(comm, 'mpi_comm', getattr(comm, 'comm', comm))
