"""Clocks of ranks and links between them, as messages to and fro tell."""
# One rank sends, the other answers with the time by its clock.  A short
# message says how far the clocks are apart and how long messages take on
# their way; a long one, answered by a short one, how many bytes pass in that
# direction.  The fastest of some counts: what else a machine does makes
# messages slower only.
#
# A link that was idle may pass some 128 KiB at once, on virtual machines and
# in networks that are shaped, so a long message must be far longer to show the
# rate.  A core may have other work for 10 ms, longer than a message takes, so
# there are more long messages where they are short in time; slow links take
# long, and no third one is sent after a tenth of a second.
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy
from mpi4py import MPI

from .ranks import machine_name
from .waiting import wait_until

_TAG, _SMALL, _LARGE = 7, 64, 1 << 19       # bytes of a message
#: Short messages: at least, and at most while the fastest one takes longer
#: than so many seconds to and fro, as with a rank that waits for a core.
_FEWEST, _MOST, _GOOD = 16, 100, 100e-6
#: Long messages: at least and at most, and seconds after which there are
#: enough.
_LEAST_LONG, _MOST_LONG, _LONG_ENOUGH, _TOO_LONG = 3, 16, 0.025, 0.1


class RoundTrip(NamedTuple):
    """A question for the time and its answer.

    The answer was true at some moment between question and answer; if half
    of the round trip has passed until then, the clocks differ by what the
    two show.  They differ by that to half of the round trip at most, however
    unequal the two ways are (Cristian, "Probabilistic clock
    synchronization", 1989).

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
    """The shortest of round trips, which bounds the offset best."""
    return min(trips, key=lambda trip: trip.error)


class PairSpeed(NamedTuple):
    """From one rank to another.

    Attributes:
        source: The rank that sends.
        target: The other one.
        latency: Seconds of a short message, one way: half of a round trip.
        bandwidth: Bytes per second of one of 512 KiB, in this direction.
    """

    source: int
    target: int
    latency: float
    bandwidth: float


def clock_name() -> str:
    """Equal for processes that share the clock of ``time.monotonic``.

    That is one for each system that was booted, and on Linux for each
    namespace of time.
    """
    name = machine_name()
    with contextlib.suppress(OSError):
        name += os.readlink('/proc/self/ns/time')
    return name


def measure_offsets(comm: MPI.Comm, names: Sequence[str]
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
            best = best_trip(_ask(comm, rank, _SMALL, _goes_on_short))
            found[name] = best.offset, best.error
        elif comm.rank == rank:
            _answer(comm, 0, _SMALL)
    return [found[name] for name in names] if comm.rank == 0 else []


def measure_links(comm: MPI.Comm) -> tuple[float, float]:
    """The slowest link between neighbours; call it on all ranks.

    Every second pair is measured at a time.  On links of 1 Gbit/s this takes
    0.2 s.

    Args:
        comm: The ranks of a pipeline, in the order of the stages.

    Returns:
        Seconds of a short message and bytes per second, the same on all
        ranks; of one rank 0 and infinity.
    """
    mine = _speeds(comm, [[(rank, rank + 1) for rank in range(
        first, comm.size - 1, 2)] for first in (0, 1)])
    every = [(0.0, float('inf')), *(pair[2:] for pairs in comm.allgather(mine)
                                    for pair in pairs)]
    latencies, bandwidths = zip(*every, strict=True)
    return max(latencies), min(bandwidths)


def measure_pairs(comm: MPI.Comm, hosts: Sequence[str]) -> list[PairSpeed]:
    """Sends between ranks of different hosts, each way; on all ranks.

    Of each host one rank takes part, and in each round each of them is in
    one pair at most, so that messages of pairs do not share a link.  A pair
    takes 60 ms; at 500 Mbit/s it sends 4 times 1 MiB.

    Args:
        comm: The ranks, whose messages meet no others here.
        hosts: The host of each rank.

    Returns:
        On rank 0, of all pairs and both directions; elsewhere of those in
        which the rank has sent.
    """
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found = _speeds(comm, [[(ranks[one], ranks[other]) for one, other in pairs]
                           for pairs in rounds(len(ranks))])
    everyone = comm.gather(found)
    return (found if everyone is None
            else [pair for pairs in everyone for pair in pairs])


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which nobody is in two pairs.

    The circle method of tournaments.
    """
    players: list[int | None] = [*range(count), *([None] * (count % 2))]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        yield [(one, other) for one, other in zip(
            players[:half], players[:half - 1:-1], strict=True)
            if one is not None and other is not None]
        players.insert(1, players.pop())


def _speeds(comm: MPI.Comm, rounds: Iterable[Sequence[tuple[int, int]]]
            ) -> list[PairSpeed]:
    """Measures pairs, those of a round at a time: what this rank has sent."""
    found = []
    for pairs in rounds:
        # MPI's own barrier would keep the core from ranks that still work.
        wait_until(comm.Ibarrier().Test)
        for one, other in map(sorted, pairs):
            for source, target in ((one, other), (other, one)):
                if comm.rank == source:
                    short, long = (
                        2 * best_trip(_ask(comm, target, size, goes_on)).error
                        for size, goes_on in ((_SMALL, _goes_on_short),
                                              (_LARGE, _goes_on_long)))
                    found.append(PairSpeed(source, target, short / 2,
                                           _LARGE / max(long - short, 1e-9)))
                elif comm.rank == target:
                    for size in (_SMALL, _LARGE):
                        _answer(comm, source, size)
    return found


def _goes_on_short(trips: Sequence[RoundTrip]) -> bool:
    number = len(trips) + 1
    return number < _FEWEST or (
        number < _MOST and 2 * best_trip(trips).error > _GOOD)


def _goes_on_long(trips: Sequence[RoundTrip]) -> bool:
    number, spent = len(trips) + 1, sum(2 * trip.error for trip in trips)
    return number < _MOST_LONG and spent < (
        _TOO_LONG if number < _LEAST_LONG else _LONG_ENOUGH)


def _ask(comm: MPI.Comm, peer: int, size: int,
         goes_on: Callable[[Sequence[RoundTrip]], bool]) -> list[RoundTrip]:
    trips: list[RoundTrip] = []
    data, answer = numpy.ones(size, numpy.uint8), numpy.zeros(1)
    while data[0]:
        data[0] = goes_on(trips)        # says whether another one follows
        asked = time.monotonic()
        wait_until(comm.Isend(data, peer, _TAG).Test)
        wait_until(comm.Irecv(answer, peer, _TAG).Test)
        trips.append(RoundTrip(asked, float(answer[0]), time.monotonic()))
    return trips


def _answer(comm: MPI.Comm, peer: int, size: int) -> None:
    data, answer = numpy.ones(size, numpy.uint8), numpy.zeros(1)
    while data[0]:
        wait_until(comm.Irecv(data, peer, _TAG).Test)
        answer[0] = time.monotonic()
        wait_until(comm.Isend(answer, peer, _TAG).Test)
