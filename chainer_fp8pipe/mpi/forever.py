"""Memory that MPI may read or write until the process ends."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from mpi4py import MPI


def keep_forever(owner: Any) -> None:
    """Never frees an object, nor anything it refers to.

    A message that was given up may still arrive in its buffer, even in
    MPI_Finalize.  mpi4py calls that after the interpreter has freed the
    variables of all modules, so a reference in one of those is not enough.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class HeldRequest:
    """A request of MPI's whose buffers are never freed before it is complete.

    Also if nobody waits for it any more, because of an exception or at the
    end of the program.

    Args:
        request: One that has been started.
        buffers: All that it reads or writes; mpi4py's requests of reductions
            do not hold them.
    """

    def __init__(self, request: MPI.Request, *buffers: Any) -> None:
        self._request = request
        self._buffers = buffers

    def test(self) -> bool:
        """Whether it is complete."""
        return self._request.Test()

    def __del__(self, keep: Callable[[Any], None] = keep_forever) -> None:
        if self._request:
            keep((self._request, self._buffers))
