"""How fast each pair of ranks sends to each other, in either direction."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..waiting import wait_until

_SMALL, _TAG = 64, 8
#: A link that was idle may pass some 128 KiB at once, on virtual machines and
#: in networks that are shaped: a message must be far longer to show the rate.
_LARGE = 1 << 19
#: Short messages: at least, and at most while the fastest one takes longer
#: than so many seconds to and fro, as with a rank that waits for a core.
_FEWEST, _MOST, _GOOD = 16, 64, 100e-6
#: Long messages: at least and at most, and seconds after which there are
#: enough: a core may have other work for 10 ms, longer than a message takes.
#: Slow links take long, and no third one is sent after a tenth of a second.
_LEAST_LONG, _MOST_LONG, _LONG_ENOUGH, _TOO_LONG = 3, 16, 0.025, 0.1


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


def measure_pairs(comm: MPI.Comm, hosts: list[str]) -> list[PairSpeed]:
    """Sends between ranks of different hosts, each way; on all ranks.

    Of each host one rank takes part, and in each round each of them is in
    one pair at most, so that messages of pairs do not share a link.  A long
    message is answered by a short one, so that its time is that of one
    direction.  The fastest counts: what else a machine does makes messages
    slower only.  A pair takes 60 ms; at 500 Mbit/s it sends 4 times 1 MiB.

    Args:
        comm: The ranks, whose messages meet no others here.
        hosts: The host of each rank.

    Returns:
        On rank 0, of all pairs and both directions; elsewhere of those in
        which the rank has sent.
    """
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found = []
    for pairs in rounds(len(ranks)):
        for one, other in pairs:
            ends = sorted((ranks[one], ranks[other]))
            if comm.rank in ends:
                found.append(_to_and_fro(comm, ends))
        # Nobody begins a round while others are in the one before.
        wait_until(comm.Ibarrier().Test)
    everyone = comm.gather(found)
    return (found if everyone is None
            else [pair for pairs in everyone for pair in pairs])


def _to_and_fro(comm: MPI.Comm, ends: list[int]) -> PairSpeed:
    """First one end sends, then the other; the speed that this rank has."""
    found = None
    for source, target in (ends, ends[::-1]):
        if comm.rank == source:
            short = _ask(comm, target, _SMALL, _goes_on_short)
            long = _ask(comm, target, _LARGE, _goes_on_long)
            found = PairSpeed(source, target, short / 2,
                              _LARGE / max(long - short, 1e-9))
        else:
            for size in (_SMALL, _LARGE):
                _answer(comm, source, size)
    assert found
    return found


def _goes_on_short(trips: int, best: float, spent: float) -> bool:
    return trips < _FEWEST or (trips < _MOST and best > _GOOD)


def _goes_on_long(trips: int, best: float, spent: float) -> bool:
    return spent < (_TOO_LONG if trips < _LEAST_LONG else _LONG_ENOUGH
                    ) and trips < _MOST_LONG


def _ask(comm: MPI.Comm, peer: int, size: int,
         goes_on: Callable[[int, float, float], bool]) -> float:
    """Seconds from sending to the short answer, of the fastest message."""
    data, answer = numpy.zeros(size, numpy.uint8), numpy.empty(1, numpy.uint8)
    best, spent, trips = float('inf'), 0.0, 0
    data[0] = 1
    while data[0]:
        trips += 1
        # Says whether another one follows.
        data[0] = goes_on(trips, best, spent)
        start = time.perf_counter()
        wait_until(comm.Isend(data, peer, _TAG).Test)
        wait_until(comm.Irecv(answer, peer, _TAG).Test)
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
    return best


def _answer(comm: MPI.Comm, peer: int, size: int) -> None:
    data, answer = numpy.ones(size, numpy.uint8), numpy.zeros(1, numpy.uint8)
    while data[0]:
        wait_until(comm.Irecv(data, peer, _TAG).Test)
        wait_until(comm.Isend(answer, peer, _TAG).Test)


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
