"""How much ranks that share cores slow each other down."""
from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from ...planning.cores import Cores
from .laps import clock_of

#: Differs between machines, and is the same in all containers and network
#: namespaces of a machine, which have host names of their own.
_BOOT = '/proc/sys/kernel/random/boot_id'
_ROUNDS, _ENOUGH = 3, 4.0       # fewer rounds, after so many seconds
_SIDE = 192             # of the matrices that keep a core busy


def measure_cores(comm: Any, device: Any, work: Callable[[], Any]) -> Cores:
    """Has ranks work alone, then together; call it on all ranks.

    First one rank of each pool of cores works, while the others wait as they
    wait in a pipeline; then all work, until the last one is through.  Wall
    clock time is divided by the processor time of a rank that works alone.
    The fastest of several rounds counts, as other programs may take time.

    Args:
        comm: All ranks, mpi4py's.
        device: Chainer's, on which they compute.
        work: Takes some tenths of a second; the same on all ranks.

    Raises:
        RuntimeError: The work has failed on a rank; on all ranks.
    """
    pools = pools_of(comm.allgather(_cores()))
    begin = time.perf_counter()
    rounds: list[list[_Found]] = []
    while len(rounds) < _ROUNDS and comm.bcast(
            time.perf_counter() - begin < _ENOUGH):
        rounds.append(comm.allgather(
            _round(comm, device, work, pools.index(pools[comm.rank]))))
    single, full = [], []
    for pool in range(max(pools) + 1):
        first = pools.index(pool)
        processor = min(found[first].processor for found in rounds)
        single.append(min(found[first].alone for found in rounds)
                      / processor)
        full.append(min(statistics.mean(
            one.together for one, of in zip(found, pools, strict=True)
            if of == pool) for found in rounds) / processor)
    return Cores(tuple(pools), max(statistics.mean(single), 1.0),
                 tuple(max(factor, 1.0) for factor in full))


def crowding(comm: Any, cores: Cores) -> float:
    """How much longer work takes by processor time where all ranks work.

    They share memory and caches, and the parts of a core that looks like
    two.  What is measured while all ranks work has that in it already.

    Args:
        comm: All ranks, mpi4py's.
        cores: Measured.
    """
    every = comm.allgather(_cores())
    found = []
    for pool, full in enumerate(cores.full):
        of = [mine for mine, number in zip(every, cores.pools, strict=True)
              if number == pool]
        found.append(full / max(1.0, len(of) / len(set().union(*of))))
    return max(statistics.mean(found), 1.0) if found else 1.0


class _Found(NamedTuple):
    """Seconds of the work; ``processor`` is the processor time alone."""

    alone: float
    processor: float
    together: float


def _round(comm: Any, device: Any, work: Callable[[], Any], first: int
           ) -> _Found:
    """Has the first rank of each pool work, then all."""
    alone = raise_together(comm, lambda: _timed(device, work)
                           if comm.rank == first else (0.0, 0.0))
    wait_until(comm.Ibarrier().Test)
    together = raise_together(comm, lambda: _busy(comm, device, work))
    return _Found(alone[0], alone[1], together)


def pools_of(cores: Sequence[set]) -> list[int]:
    """The number of each rank's pool, in the order of their first ranks.

    Args:
        cores: Those that each rank may use.  Ranks with some in common are
            in one pool.
    """
    sets: list[set] = []
    for mine in cores:
        meets = [other for other in sets if other & mine]
        sets = [*(other for other in sets if other not in meets),
                mine.union(*meets)]
    found = [next(index for index, other in enumerate(sets) if other & mine)
             for mine in cores]
    order = list(dict.fromkeys(found))
    return [order.index(pool) for pool in found]


def _cores() -> set[tuple[str, int]]:
    """The cores that this process may use, with the machine's name."""
    try:
        with open(_BOOT) as file:
            machine = file.read().strip()
    except OSError:                     # not Linux
        machine = socket.gethostname()
    if hasattr(os, 'sched_getaffinity'):
        return {(machine, core) for core in os.sched_getaffinity(0)}
    return {(machine, 0)}


def _timed(device: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """Wall clock seconds, and those of the device."""
    now = clock_of(device)
    start, begin = time.perf_counter(), now()
    work()
    spent = now() - begin
    return time.perf_counter() - start, spent


def _busy(comm: Any, device: Any, work: Callable[[], Any]) -> float:
    """Wall clock seconds; keeps the core busy until all are through."""
    try:
        return _timed(device, work)[0]
    finally:
        request = comm.Ibarrier()
        matrix = numpy.ones((_SIDE, _SIDE), 'f')
        while not request.Test():
            matrix @ matrix
