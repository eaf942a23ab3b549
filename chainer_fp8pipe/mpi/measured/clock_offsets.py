"""How far the clocks of ranks are ahead of rank 0's, by messages.

A rank asks another for the time and gets it back.  The answer was true at
some moment between question and answer; if half of the round trip has passed
until then, the clocks differ by what the two show.  They differ by that to
half of the round trip at most, however unequal the two ways are (Cristian,
"Probabilistic clock synchronization", 1989).  The shortest of many round trips
says most.
"""
from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..waiting import wait_until

#: Round trips between two clocks: at least, and at most while the best one
#: leaves an error of more than :data:`_GOOD` seconds.
_FEWEST, _MOST, _GOOD = 16, 200, 50e-6
_TAG = 7


class RoundTrip(NamedTuple):
    """A question for the time and its answer.

    Attributes:
        asked: When the question left, by the clock of who asks.
        answered: What the other clock showed.
        received: When the answer came, by the clock of who asks.
    """

    asked: float
    answered: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds that the other clock is ahead."""
        return self.answered - (self.asked + self.received) / 2

    @property
    def error(self) -> float:
        """The offset is right to so many seconds."""
        return (self.received - self.asked) / 2


def best_trip(trips: Iterable[RoundTrip]) -> RoundTrip:
    """The shortest round trip, which bounds the offset best."""
    return min(trips, key=lambda trip: trip.error)


def clock_name() -> str:
    """Equal for processes that share the clock of ``time.monotonic``.

    That is one for each system that was booted, and on Linux for each
    namespace of time.
    """
    name = platform.node()
    with contextlib.suppress(OSError), open(
            '/proc/sys/kernel/random/boot_id') as file:
        name = file.read().strip()
    with contextlib.suppress(OSError):
        name += os.readlink('/proc/self/ns/time')
    return name


def measure_offsets(comm: MPI.Comm, names: list[str]
                    ) -> list[tuple[float, float]]:
    """Each rank's offset and its error, in seconds; on all ranks.

    Ranks that share rank 0's clock are not asked; of others that share one,
    one is.  A pair takes some milliseconds.

    Args:
        comm: The ranks, whose messages meet no others here.
        names: The clock of each rank, see :func:`clock_name`.

    Returns:
        By rank, on rank 0; elsewhere nothing.
    """
    found = {names[0]: (0.0, 0.0)}
    for rank, name in enumerate(names):
        if name in found:
            continue
        found[name] = (0.0, 0.0)
        if comm.rank == 0:
            best = best_trip(_ask(comm, rank))
            found[name] = best.offset, best.error
        elif comm.rank == rank:
            _answer(comm)
    return [found[name] for name in names] if comm.rank == 0 else []


def _ask(comm: MPI.Comm, rank: int) -> list[RoundTrip]:
    trips: list[RoundTrip] = []
    answer, more = numpy.zeros(1), numpy.ones(1, numpy.uint8)
    while more[0]:
        more[0] = len(trips) + 1 < _FEWEST or (
            len(trips) + 1 < _MOST and best_trip(trips).error > _GOOD)
        asked = time.monotonic()
        comm.Isend(more, rank, _TAG).Wait()
        wait_until(comm.Irecv(answer, rank, _TAG).Test)
        received = time.monotonic()
        # The first one also makes the connection.
        trips.append(RoundTrip(asked, float(answer[0]), received))
    return trips


def _answer(comm: MPI.Comm) -> None:
    more, answer = numpy.ones(1, numpy.uint8), numpy.zeros(1)
    while more[0]:
        wait_until(comm.Irecv(more, 0, _TAG).Test)
        answer[0] = time.monotonic()
        comm.Isend(answer, 0, _TAG).Wait()
