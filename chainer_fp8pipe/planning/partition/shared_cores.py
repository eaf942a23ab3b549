"""A step of several pipelines whose ranks share cores.

The simulator of schedules gives every rank a core of its own.  Ranks that
share cores are the slower the more of them compute at a time: a schedule
with idle ranks loses less by that than one without.  So here all ranks run on
one clock, each as fast as the number of busy ranks around it allows.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...pipeline.schedules.actions import Action, Kind, Schedule
from ..schedules.simulator import Costs, Link

_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
#: Seconds of work that rounding may leave.
_NOTHING = 1e-12


@dataclass(frozen=True)
class Cores:
    """Which ranks compute on the same cores, and what they lose by it.

    Attributes:
        pools: For each rank, the number of the pool of cores it runs on.
        single: How many times as long a call takes as its processor time,
            where no other rank of the pool computes.
        full: For each pool, how many times as long where all of its ranks
            compute.
    """

    pools: tuple[int, ...]
    single: float = 1.0
    full: tuple[float, ...] = ()

    def slowdown(self, pool: int, busy: int) -> float:
        """How many times as long a call takes.

        Args:
            pool: In which it runs.
            busy: How many ranks of the pool compute.
        """
        full = self.full[pool] if self.full else 1.0
        return max(self.single, full * busy / self.pools.count(pool))


def shared_step(schedule: Schedule, costs: Sequence[Costs], link: Link,
                ranks: Sequence[Sequence[int]], cores: Cores) -> float:
    """Seconds of a step of all replicas, without exchange and update.

    Args:
        schedule: Of each pipeline.
        costs: Processor time, one per chunk of the whole model.
        link: Between stages; sending costs a rank no time.
        ranks: ``ranks[stage][replica]`` is the rank there.
        cores: Of the ranks.

    Raises:
        ValueError: The ranks wait for each other forever.
    """
    pipelines = [_Pipeline(schedule, costs, link)
                 for _ in range(len(ranks[0]))]
    workers = [_Worker(pipeline, stage, cores.pools[rank])
               for stage, row in enumerate(ranks)
               for pipeline, rank in zip(pipelines, row, strict=True)]
    now = 0.0
    while True:
        while any([worker.advance(now) for worker in workers]):
            pass
        if all(worker.done for worker in workers):
            return now
        now = _until_next(workers, now, cores)


def _until_next(workers: Sequence[_Worker], now: float,
                cores: Cores) -> float:
    """The time at which the next worker has something new to do."""
    computing = [worker for worker in workers if worker.left > 0]
    busy = Counter(worker.pool for worker in computing)
    slower = {pool: cores.slowdown(pool, count)
              for pool, count in busy.items()}
    times = [now + worker.left * slower[worker.pool]
             for worker in computing]
    times += [arrival for worker in workers
              if (arrival := worker.arrival()) is not None and arrival > now]
    if not times:
        raise ValueError('the ranks of this schedule wait for each other')
    then = min(times)
    for worker in computing:
        worker.left -= (then - now) / slower[worker.pool]
        if worker.left < _NOTHING:
            worker.left = 0.0
    return then


class _Pipeline:
    """What the ranks of a replica send to each other."""

    def __init__(self, schedule: Schedule, costs: Sequence[Costs],
                 link: Link) -> None:
        self.schedule, self.costs, self._link = schedule, costs, link
        #: When a message arrives, by kind of receive, boundary, micro-batch.
        self.arrivals: dict[tuple[Kind, int, int], float] = {}
        self._free: dict[tuple[int, Kind], float] = {}

    def send(self, stage: int, action: Action, now: float) -> None:
        """A message leaves when those before it have left."""
        link, wire = self._link, (stage, action.kind)
        start = max(now, self._free.get(wire, 0.0))
        on_wire = link.message_bytes[action.boundary] / link.bandwidth
        self._free[wire] = start + on_wire
        kind = (Kind.RECEIVE_ACTIVATION
                if action.kind is Kind.SEND_ACTIVATION
                else Kind.RECEIVE_GRADIENT)
        self.arrivals[kind, action.boundary, action.micro_batch] = (
            start + on_wire + link.latency)

    def work(self, action: Action) -> float:
        """Seconds of the processor that an action takes."""
        cost = self.costs[action.chunk]
        if action.kind is Kind.FORWARD:
            return cost.forward
        if action.kind is Kind.BACKWARD_WEIGHT:
            return cost.backward_weight
        whole = action.kind is Kind.BACKWARD
        return (cost.recompute + cost.backward_input
                + whole * cost.backward_weight)


class _Worker:
    """A rank; ``left`` is what remains of the call that it computes."""

    def __init__(self, pipeline: _Pipeline, stage: int, pool: int) -> None:
        self.pool, self.left = pool, 0.0
        self._pipeline, self._stage = pipeline, stage
        self._actions = pipeline.schedule.actions[stage]
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether it is through."""
        return self._next == len(self._actions) and not self.left

    def arrival(self) -> float | None:
        """When the message comes that it waits for, as far as is known."""
        if self.left or self._next == len(self._actions):
            return None
        action = self._actions[self._next]
        return self._pipeline.arrivals.get(
            (action.kind, action.boundary, action.micro_batch))

    def advance(self, now: float) -> bool:
        """Does what takes no time; whether there was anything to do."""
        moved = False
        while not self.left and self._next < len(self._actions):
            action = self._actions[self._next]
            if action.kind in _RECEIVES:
                arrival = self.arrival()
                if arrival is None or arrival > now:
                    break
            elif action.kind in _SENDS:
                self._pipeline.send(self._stage, action, now)
            else:
                self.left = self._pipeline.work(action)
            self._next += 1
            moved = True
        return moved
