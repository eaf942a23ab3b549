"""Links between ranks, as messages to and fro tell."""
# One rank sends, the other answers.  A short message says how long messages
# take on their way; a long one, answered by a short one, how many bytes pass
# in that direction.  The fastest of some counts: other work of a machine makes
# messages slower only.
#
# A link that was idle may pass some 128 KiB at once, on virtual machines and
# in networks that are shaped, so a long message must be far longer to show the
# rate.  A core may have other work for 10 ms, longer than a message takes, so
# there are more long messages where they are short in time; slow links take
# long, and no third one is sent after a tenth of a second.
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy
from mpi4py import MPI

from .waiting import wait_until

_TAG, _SMALL, _LARGE = 7, 64, 1 << 19       # bytes of a message
#: Short messages: at least, and at most while the fastest one takes longer
#: than so many seconds to and fro, as with a rank that waits for a core.
_FEWEST, _MOST, _GOOD = 16, 100, 100e-6
#: Long messages: at least and at most, and seconds after which there are
#: enough.
_LEAST_LONG, _MOST_LONG, _LONG_ENOUGH, _TOO_LONG = 3, 16, 0.025, 0.1


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
                    short = min(_ask(comm, target, _SMALL, _goes_on_short))
                    long = min(_ask(comm, target, _LARGE, _goes_on_long))
                    found.append((short / 2,
                                  _LARGE / max(long - short, 1e-9)))
                elif comm.rank == target:
                    for size in (_SMALL, _LARGE):
                        _answer(comm, source, size)
    latencies, bandwidths = zip(*(pair for pairs in comm.allgather(found)
                                  for pair in pairs), strict=True)
    return max(latencies), min(bandwidths)


def _goes_on_short(trips: Sequence[float]) -> bool:
    number = len(trips) + 1
    return number < _FEWEST or (number < _MOST and min(trips) > _GOOD)


def _goes_on_long(trips: Sequence[float]) -> bool:
    number = len(trips) + 1
    return number < _MOST_LONG and sum(trips) < (
        _TOO_LONG if number < _LEAST_LONG else _LONG_ENOUGH)


def _ask(comm: MPI.Comm, peer: int, size: int,
         goes_on: Callable[[Sequence[float]], bool]) -> list[float]:
    """Seconds of round trips."""
    trips: list[float] = []
    data, answer = numpy.ones(size, numpy.uint8), numpy.zeros(1)
    while data[0]:
        data[0] = goes_on(trips)        # says whether another one follows
        asked = time.monotonic()
        wait_until(comm.Isend(data, peer, _TAG).Test)
        wait_until(comm.Irecv(answer, peer, _TAG).Test)
        trips.append(time.monotonic() - asked)
    return trips


def _answer(comm: MPI.Comm, peer: int, size: int) -> None:
    data, answer = numpy.ones(size, numpy.uint8), numpy.zeros(1)
    while data[0]:
        wait_until(comm.Irecv(data, peer, _TAG).Test)
        wait_until(comm.Isend(answer, peer, _TAG).Test)
