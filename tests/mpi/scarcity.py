"""An MPI that has few communicators left, for tests of what is given back."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpi4py import MPI

_MOST = 5000


@contextlib.contextmanager
def communicators_left(comm: MPI.Comm, left: int) -> Iterator[None]:
    """Takes all of MPI's communicators but ``left``; on all ranks of comm.

    MPICH has 2,048 of them.  Of an MPI with more than 5,000, no more are
    taken: there a test sees only that nothing fails.
    """
    taken = []
    try:
        with contextlib.suppress(MPI.Exception):
            while len(taken) < _MOST:
                taken.append(comm.Dup())
        for _ in range(left):
            taken.pop().Free()
        yield
    finally:
        for one in taken:
            one.Free()
