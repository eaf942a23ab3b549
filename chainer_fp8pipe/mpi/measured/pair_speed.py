"""How fast each pair of ranks sends to each other."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpi4py import MPI

from ..waiting import wait_until
from .link_speed import one_way

_SMALL, _LARGE, _ROUNDS, _TAG = 64, 1 << 17, 3, 8


class PairSpeed(NamedTuple):
    """From one rank to another and back.

    Attributes:
        source: The rank that begins.
        target: The other one.
        latency: Seconds of a short message, one way.
        bandwidth: Bytes per second of one of 128 KiB.
    """

    source: int
    target: int
    latency: float
    bandwidth: float


def measure_pairs(comm: MPI.Comm, hosts: list[str]) -> list[PairSpeed]:
    """Sends to and fro between ranks of different hosts; on all ranks.

    Of each host one rank takes part, and in each round each of them is in
    one pair at most, so that messages of pairs do not share a link.  A pair
    sends 3 times 256 KiB: 15 ms at 500 Mbit/s.

    Args:
        comm: The ranks, whose messages meet no others here.
        hosts: The host of each rank.

    Returns:
        On rank 0, of all pairs; elsewhere of those that the rank has begun.
    """
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found = []
    for pairs in rounds(len(ranks)):
        for one, other in pairs:
            source, target = sorted((ranks[one], ranks[other]))
            if comm.rank in (source, target):
                peer = target if comm.rank == source else source
                short, long = (
                    one_way(comm, peer, comm.rank == source, size, _ROUNDS,
                            _TAG) for size in (_SMALL, _LARGE))
                if comm.rank == source:
                    found.append(PairSpeed(
                        source, target, short,
                        (_LARGE - _SMALL) / max(long - short, 1e-9)))
        # Nobody begins a round while others are in the one before.
        wait_until(comm.Ibarrier().Test)
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
