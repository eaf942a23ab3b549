"""Links between ranks, as messages to and fro tell."""
# One rank sends, the other answers.  A short message says how long messages
# take on their way; a long one, answered by a short one, how many bytes pass
# in that direction.  The fastest of some counts: other work of a machine makes
# messages slower only.
#
# A link that was idle may pass some 128 KiB at once, on virtual machines and
# in networks that are shaped, so a long message must be far longer to show the
# rate.  A core may have other work for 10 ms, so there are several.
from __future__ import annotations

import time

import numpy
from mpi4py import MPI

from .waiting import wait_until

_TAG, _SMALL, _LARGE = 7, 64, 1 << 19       # bytes of a message
#: How many of each.
_TIMES = {_SMALL: 40, _LARGE: 6}


def measure_links(comm: MPI.Comm) -> tuple[float, float]:
    """The slowest link between neighbours; call it on all ranks.

    Every second pair is measured at a time.  On links of 1 Gbit/s this takes
    0.2 s.

    Args:
        comm: The ranks of a pipeline, in the order of the stages, whose
            messages meet no others here.

    Returns:
        Seconds of a short message, one way: half of a round trip; and bytes
        per second of one of 512 KiB in the slower direction.  The same on all
        ranks; of one rank 0 and infinity.
    """
    found = [(0.0, float('inf'))]
    for first in 0, 1:
        # MPI's own barrier would keep the core from ranks that still work.
        wait_until(comm.Ibarrier().Test)
        for low in range(first, comm.size - 1, 2):
            for source, target in ((low, low + 1), (low + 1, low)):
                if comm.rank == source:
                    short = min(_ask(comm, target, _SMALL))
                    long = min(_ask(comm, target, _LARGE))
                    found.append((short / 2,
                                  _LARGE / max(long - short, 1e-9)))
                elif comm.rank == target:
                    for size in (_SMALL, _LARGE):
                        _answer(comm, source, size)
    latencies, bandwidths = zip(*(pair for pairs in comm.allgather(found)
                                  for pair in pairs), strict=True)
    return max(latencies), min(bandwidths)


def _ask(comm: MPI.Comm, peer: int, size: int) -> list[float]:
    """Seconds of round trips."""
    trips, data, answer = [], numpy.ones(size, numpy.uint8), numpy.zeros(1)
    for _ in range(_TIMES[size]):
        asked = time.monotonic()
        wait_until(comm.Isend(data, peer, _TAG).Test)
        wait_until(comm.Irecv(answer, peer, _TAG).Test)
        trips.append(time.monotonic() - asked)
    return trips


def _answer(comm: MPI.Comm, peer: int, size: int) -> None:
    data, answer = numpy.empty(size, numpy.uint8), numpy.zeros(1)
    for _ in range(_TIMES[size]):
        wait_until(comm.Irecv(data, peer, _TAG).Test)
        wait_until(comm.Isend(answer, peer, _TAG).Test)
