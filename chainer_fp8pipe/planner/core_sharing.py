"""How much ranks that share cores and memory slow each other down."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..chains.profiling.laps import clock_of
from ..mpi.agreement import raise_together
from ..mpi.processors import own_cores, pools_of
from ..mpi.waiting import wait_until
from ..planning.cores import Cores

#: Passes of a visit, alone and together, and seconds after which there are no
#: more of either.
_FEWEST, _MOST, _ENOUGH = 2, 12, 0.5
#: Seconds of a visit after which the first one is the only one.
_LONG = 6.0
#: A rank that takes so many times as long as the others is slow.
SLOW = 1.5


class _Pass(NamedTuple):
    """Seconds of a pass on one rank: of the wall clock, of the processor."""

    wall: float
    processor: float


class CoreSharing:
    """Ranks that work alone and all at once, some passes at a time.

    A machine is not equally fast all the time: other tenants come and go, and
    clocks change.  So the passes are made in visits, between the planner's
    other measurements, and medians of all count.

    Args:
        comm: All ranks, mpi4py's.
        device: Chainer's, on which they compute.
        work: A pass; the same on all ranks.
    """

    def __init__(self, comm: Any, device: Any, work: Callable[[], Any]
                 ) -> None:
        self._comm, self._device, self._work = comm, device, work
        self._every = comm.allgather(own_cores())
        self._pools = pools_of(self._every)
        self._alone: list[list[list[_Pass]]] = []       # visit, rank, pass
        self._together: list[list[_Pass]] = []          # rank, pass
        self._seconds = 0.0         # of the first visit

    def visit(self) -> None:
        """Makes some passes; call it on all ranks.

        First one rank of each pool of cores works, while the others wait as
        they wait in a pipeline: anew for each pass, as a wait that has just
        begun looks for messages more often.  Then all do, who begin each pass
        together.

        Raises:
            RuntimeError: The work has failed on a rank; on all ranks.
        """
        if self._seconds > _LONG:
            return
        begin = time.perf_counter()
        if not self._alone:         # gets memory, and imports
            raise_together(self._comm, self._timed)
        first = self._pools.index(self._pools[self._comm.rank])
        self._alone.append(self._comm.allgather(self._passes(
            self._comm.rank == first)))
        together = self._comm.allgather(self._passes(True))
        self._together = [
            before + found for before, found in zip(
                self._together or [[]] * len(together), together,
                strict=True)]
        self._seconds = self._seconds or self._comm.bcast(
            time.perf_counter() - begin)

    def forget_work(self) -> None:
        """Lets go of what the work holds; there are no more visits."""
        del self._work

    # --- what was found ------------------------------------------------------

    @property
    def cores(self) -> Cores:
        """Wall clock time over the processor time of a rank alone."""
        single, full = [], []
        for pool in range(max(self._pools) + 1):
            alone = [one for visit in self._alone
                     for one in visit[self._pools.index(pool)]]
            processor = statistics.median(one.processor for one in alone)
            single.append(statistics.median(one.wall for one in alone)
                          / processor)
            full.append(statistics.median(map(statistics.mean, zip(
                *self._of_pool(pool), strict=True))) / processor)
        return Cores(tuple(self._pools), max(statistics.mean(single), 1.0),
                     tuple(max(factor, 1.0) for factor in full))

    @property
    def straggling(self) -> float:
        """How much longer than the mean the last rank takes for a pass.

        No rank is slow for good, but in each pass one comes last, and all
        others wait for its gradients.
        """
        speeds = self.speeds
        walls = [[one.wall / speed for one in passes]
                 for passes, speed in zip(self._together, speeds,
                                          strict=True)]
        return statistics.median(
            max(of) / statistics.mean(of) for of in zip(*walls, strict=True))

    @property
    def speeds(self) -> tuple[float, ...]:
        """How many times as long as the median each rank takes, if slow.

        By processor time, so that ranks that share cores are no reason.
        """
        seconds = [statistics.median(one.processor for one in passes)
                   for passes in self._together]
        median = statistics.median_low(seconds)     # of two, the faster
        # Ranks that share a core's parts or caches differ by chance.
        return tuple(one / median if one > SLOW * median else 1.0
                     for one in seconds)

    @property
    def drift(self) -> float:
        """Processor time of a pass in all visits, over that in the first."""
        first = self._pools.index(self._pools[0])
        return (statistics.median(one.processor for visit in self._alone
                                  for one in visit[first])
                / statistics.median(one.processor for one
                                    in self._alone[0][first]))

    @property
    def crowding(self) -> float:
        """How much longer work takes by processor time where all ranks work.

        They share memory and caches, and the parts of a core that looks like
        two.  What is measured while all ranks work has that in it already.
        """
        found = []
        for pool, full in enumerate(self.cores.full):
            of = [mine for mine, number in zip(
                self._every, self._pools, strict=True) if number == pool]
            found.append(full / max(1.0, len(of) / len(set().union(*of))))
        return max(statistics.mean(found), 1.0)

    # --- passes --------------------------------------------------------------

    def _of_pool(self, pool: int) -> list[list[float]]:
        return [[one.wall for one in passes] for passes, number in zip(
            self._together, self._pools, strict=True) if number == pool]

    def _passes(self, works: bool) -> list[_Pass]:
        """Passes that all ranks begin together, which work or wait."""
        comm, found = self._comm, list[_Pass]()
        begin = time.perf_counter()
        while len(found) < _FEWEST or len(found) < _MOST and comm.bcast(
                time.perf_counter() - begin < _ENOUGH):
            wait_until(comm.Ibarrier().Test)
            found.append(raise_together(
                comm, self._timed if works else lambda: _Pass(0.0, 0.0)))
        return found

    def _timed(self) -> _Pass:
        now = clock_of(self._device)
        start, begin = time.perf_counter(), now()
        self._work()
        spent = now() - begin
        return _Pass(time.perf_counter() - start, spent)
