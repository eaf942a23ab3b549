"""MPI for compiled code: functions' addresses, and handles as numbers."""
from __future__ import annotations

import ctypes
import functools
import sys
from typing import NamedTuple

from mpi4py import MPI

#: The function that sends; tests set one that never buffers.
SEND = 'MPI_Isend'


class Library(NamedTuple):
    """What compiled code calls MPI with."""

    #: Addresses of ``MPI_Isend``, ``MPI_Irecv`` and ``MPI_Testsome``.
    functions: tuple[int, int, int]
    sizes: tuple[int, int]      # bytes of a request's handle and of a status
    byte: int                   # the handle of MPI_BYTE


def library() -> Library:
    """Of the MPI that mpi4py has loaded."""
    return Library(
        (_address(SEND), _address('MPI_Irecv'), _address('MPI_Testsome')),
        (MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)),
        handle(MPI.BYTE))


def handle(of: MPI.Comm | MPI.Datatype) -> int:
    """A handle, in C a pointer or an int, as a number."""
    size = MPI._sizeof(of)
    return int.from_bytes(
        ctypes.string_at(MPI._addressof(of), size), sys.byteorder,
        signed=size == ctypes.sizeof(ctypes.c_int))     # as a caller has it


def exception(code: int, statuses: bytes) -> MPI.Exception:
    """The error that an MPI function returned, with its messages' statuses."""
    if MPI.Get_error_class(code) == MPI.ERR_IN_STATUS:
        status = MPI.Status()
        size = MPI._sizeof(status)
        for start in range(0, len(statuses), size):
            ctypes.memmove(MPI._addressof(status),
                           statuses[start:start + size], size)
            if status.error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                return MPI.Exception(status.error)
    return MPI.Exception(code)


@functools.cache
def _address(name: str) -> int:
    # From the libraries that mpi4py was linked with.
    return ctypes.cast(getattr(ctypes.CDLL(MPI.__file__), name),
                       ctypes.c_void_p).value or 0
