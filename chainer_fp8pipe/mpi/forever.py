"""Memory that MPI may read or write until the process ends."""
from __future__ import annotations

import ctypes
from typing import Any


def keep_forever(owner: Any) -> None:
    """Never frees an object, nor anything it refers to.

    A message that was given up may still arrive in its buffer, even in
    MPI_Finalize.  mpi4py calls that after the interpreter has freed the
    variables of all modules, so a reference in one of those is not enough.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
