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


@functools.cache
def _address(name: str) -> int:
    # From the libraries that mpi4py was linked with.
    return ctypes.cast(getattr(ctypes.CDLL(MPI.__file__), name),
                       ctypes.c_void_p).value or 0
