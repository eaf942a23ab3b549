"""Host arrays of plain numbers, from one rank to all or to another."""
from __future__ import annotations

from typing import Any

import numpy
from mpi4py import MPI

from .waiting import wait_until


def broadcast_arrays(comm: MPI.Comm, value: Any,
                     arrays: list[numpy.ndarray] | None
                     ) -> tuple[Any, list[numpy.ndarray]]:
    """Rank 0's small object and arrays, on all ranks; call it on all.

    ``arrays`` are None elsewhere; rank 0 gets its own arrays back.
    """
    if comm.size == 1:
        return value, arrays or []
    specs = None if arrays is None else [
        (array.shape, array.dtype.str) for array in arrays]
    value, specs = comm.bcast((value, specs))
    found = arrays or [numpy.empty(shape, dtype) for shape, dtype in specs]
    for array in found:
        whole = numpy.ascontiguousarray(array)
        # MPI's own wait would keep the core from other ranks.
        wait_until(comm.Ibcast(
            [whole.reshape(-1).view(numpy.uint8), MPI.BYTE]).Test)
    return value, found


def send_array(comm: MPI.Comm, array: numpy.ndarray, rank: int) -> None:
    """Sends an array; waits until it has left."""
    comm.send((array.shape, array.dtype.str), rank)
    whole = numpy.ascontiguousarray(array)
    comm.Send([whole.reshape(-1).view(numpy.uint8), MPI.BYTE], rank)


def receive_array(comm: MPI.Comm, rank: int) -> numpy.ndarray:
    """Receives the array that another rank's :func:`send_array` sent."""
    shape, dtype = comm.recv(source=rank)
    array = numpy.empty(shape, dtype)
    wait_until(comm.Irecv(
        [array.reshape(-1).view(numpy.uint8), MPI.BYTE], rank).Test)
    return array
