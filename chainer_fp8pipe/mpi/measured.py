"""Links between ranks, as messages to and fro tell."""
# Each rank sends to the next one, which answers with as much.  The fastest of
# some trips counts: other work of a machine makes messages slower only.  A
# link that was idle may pass some 128 KiB at once, so a long message must be
# far longer to show the rate.
from __future__ import annotations

import time

import numpy
from mpi4py import MPI

from .waiting import wait_until

_LARGE = 1 << 19        # bytes
#: How many messages of so many bytes.
_TIMES = {64: 40, _LARGE: 6}


def measure_links(comm: MPI.Comm) -> tuple[float, float]:
    """The slowest link between neighbours, the last and the first rank too.

    Call it on all ranks, in a communicator without other messages.

    Returns:
        Seconds of a short message, one way, and bytes per second of one of
        512 KiB.  The same on all ranks; of one rank 0 and infinity.
    """
    if comm.size == 1:
        return 0.0, float('inf')
    before, after = ((comm.rank + step) % comm.size for step in (-1, 1))
    found = []
    for size, times in _TIMES.items():
        mine, other = numpy.ones((2, size), numpy.uint8)
        trips = []
        for _ in range(times):
            # MPI's own waits would keep the core from ranks that still work.
            wait_until(comm.Ibarrier().Test)
            begin = time.monotonic()
            for tag, to, source in (1, after, before), (2, before, after):
                sent = comm.Isend(mine, to, tag)
                wait_until(comm.Irecv(other, source, tag).Test)
                wait_until(sent.Test)
            trips.append(time.monotonic() - begin)
        found.append(comm.allreduce(min(trips) / 2, MPI.MAX))
    return found[0], _LARGE / max(found[1] - found[0], 1e-9)
