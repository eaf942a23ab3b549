"""Arrays of one rank, on others."""
from __future__ import annotations

from typing import Any

import numpy
from mpi4py import MPI

from .waiting import wait_until

#: Bytes of the smallest frame; smaller arrays are not cut.
_LEAST_FRAME_BYTES = 1 << 16
_MOST_FRAMES = 256
#: Frames on the way from one rank to the next.  MPICH's receiver confirms
#: each of them; with hundreds unconfirmed, confirmations wait for the
#: receiver's next call of MPI, and its neighbour would wait until then.
_UNDER_WAY = 16


def broadcast_arrays(comm: MPI.Comm, value: Any,
                     arrays: list[numpy.ndarray] | None
                     ) -> tuple[Any, list[numpy.ndarray]]:
    """Rank 0's small object and arrays, on all ranks; call it on all.

    Each rank hands large arrays on to the next one, frame by frame, so that
    they leave each port once: MPI's own tree sends 512 KiB twice out of rank
    0 and once more out of rank 2 of 4, which takes three times as long.

    Args:
        comm: The ranks; neighbours should be near each other.
        value: Of rank 0.
        arrays: Of rank 0; None elsewhere.

    Returns:
        The value, and the arrays; rank 0 gets its own back.
    """
    if comm.size == 1:
        return value, arrays or []
    specs = None if arrays is None else [
        (array.shape, array.dtype.str) for array in arrays]
    value, specs = comm.bcast((value, specs))
    found = arrays or [numpy.empty(shape, dtype) for shape, dtype in specs]
    for array in found:
        content = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        if content.size > _LEAST_FRAME_BYTES and comm.size > 2:
            _hand_on(comm, content)
        else:
            # MPI's own wait would keep the core from other ranks.
            wait_until(comm.Ibcast([content, MPI.BYTE]).Test)
    return value, found


def _hand_on(comm: MPI.Comm, content: numpy.ndarray) -> None:
    size = max(_LEAST_FRAME_BYTES, -(-content.size // _MOST_FRAMES))
    frames = [content[start:start + size]
              for start in range(0, content.size, size)]
    coming = [comm.Irecv([frame, MPI.BYTE], comm.rank - 1)
              for frame in frames] if comm.rank else []
    leaving: list[MPI.Request] = []
    for number, frame in enumerate(frames):
        if coming:
            wait_until(coming[number].Test)
        if comm.rank + 1 < comm.size:
            if number >= _UNDER_WAY:
                wait_until(leaving[number - _UNDER_WAY].Test)
            leaving.append(comm.Isend([frame, MPI.BYTE], comm.rank + 1))
    for request in leaving[-_UNDER_WAY:]:
        wait_until(request.Test)
