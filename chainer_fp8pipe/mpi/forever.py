"""Memory that MPI may read or write until the process ends."""
from __future__ import annotations

import ctypes
from typing import Any


def keep_forever(owner: Any) -> None:
    """Never frees an object, nor anything it refers to.

    What a message is written to must be there until the message has come.
    One that is given up may come at any time, even in MPI_Finalize, which
    mpi4py calls when the interpreter is gone, and with it all variables of
    all modules: a reference in one of those would not do.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
