"""Links between ranks, as messages to and fro tell."""
# One rank sends, the other answers with as much.  The fastest of some counts:
# other work of a machine makes messages slower only.  A link that was idle may
# pass some 128 KiB at once, so a long message must be far longer to show the
# rate.
from __future__ import annotations

import time

import numpy
from mpi4py import MPI

from .waiting import wait_until

_TAG, _SMALL, _LARGE = 7, 64, 1 << 19       # bytes of a message
#: How many of each.
_TIMES = {_SMALL: 40, _LARGE: 6}


def measure_links(comm: MPI.Comm) -> tuple[float, float]:
    """The slowest link between neighbours, every second pair at a time.

    Call it on all ranks, in a communicator without other messages.

    Returns:
        Seconds of a short message, one way, and bytes per second of one of
        512 KiB.  The same on all ranks; of one rank 0 and infinity.
    """
    latency, bandwidth = 0.0, float('inf')
    for first in 0, 1:
        # MPI's own barrier would keep the core from ranks that still work.
        wait_until(comm.Ibarrier().Test)
        is_low = comm.rank % 2 == first
        peer = comm.rank + (1 if is_low else -1)
        if 0 <= peer < comm.size:
            short, long = (min(_trips(comm, peer, size, is_low)) / 2
                           for size in (_SMALL, _LARGE))
            latency = max(latency, short)
            bandwidth = min(bandwidth, _LARGE / max(long - short, 1e-9))
    return (comm.allreduce(latency, MPI.MAX),
            comm.allreduce(bandwidth, MPI.MIN))


def _trips(comm: MPI.Comm, peer: int, size: int, asks: bool) -> list[float]:
    """Seconds of round trips, on both ranks."""
    data, trips = numpy.ones(size, numpy.uint8), []
    for _ in range(_TIMES[size]):
        begin = time.monotonic()
        for sends in (asks, not asks):
            wait_until((comm.Isend if sends else comm.Irecv)(
                data, peer, _TAG).Test)
        trips.append(time.monotonic() - begin)
    return trips
