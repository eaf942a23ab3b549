"""How fast neighbouring ranks send to each other."""
from __future__ import annotations

import time
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..waiting import wait_until

_SMALL, _LARGE = 1 << 10, 1 << 20       # bytes of a message
_ROUNDS = 5


class LinkSpeed(NamedTuple):
    """Speed of the slowest link between neighbours; of one rank 0, inf."""

    latency: float          # seconds of a short message
    bandwidth: float        # bytes per second


def measure_links(comm: MPI.Comm) -> LinkSpeed:
    """Sends to and fro between neighbours; call it on all ranks.

    Every second pair at a time sends 1 KiB and 1 MiB some rounds; the
    fastest counts, and all ranks get the same result.  On a link of 1 Gbit/s
    this takes 0.2 s.

    Args:
        comm: The ranks of a pipeline, in the order of the stages.
    """
    times = numpy.zeros(2)
    for first in (0, 1):
        _barrier(comm)
        lower = (comm.rank - first) % 2 == 0
        peer = comm.rank + 1 if lower else comm.rank - 1
        if 0 <= peer < comm.size and comm.rank >= first:
            times = numpy.maximum(times, [
                _one_way(comm, peer, lower, size, _ROUNDS)
                for size in (_SMALL, _LARGE)])
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    short, long = times.tolist()
    if not long:
        return LinkSpeed(0.0, float('inf'))
    return LinkSpeed(short, (_LARGE - _SMALL) / max(long - short, 1e-9))


def _barrier(comm: MPI.Comm) -> None:
    """MPI's own would keep the core from ranks that still work."""
    wait_until(comm.Ibarrier().Test)


def _one_way(comm: MPI.Comm, peer: int, begins: bool, size: int, rounds: int
             ) -> float:
    """Seconds of a message: half of the fastest round trip; call it on both.

    Args:
        comm: The ranks.
        peer: The other rank of the pair.
        begins: Whether this rank sends first.
        size: Bytes of the message.
        rounds: To and fro.
    """
    data = numpy.zeros(size, numpy.uint8)
    best = float('inf')
    for _ in range(rounds):
        start = time.perf_counter()
        for sends in (begins, not begins):
            request = (comm.Isend if sends else comm.Irecv)(data, peer)
            wait_until(request.Test)
        best = min(best, time.perf_counter() - start)
    return best / 2
