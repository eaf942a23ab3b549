"""How long computations take that share cores.

Three answers, for what is known of the machine: every rank has a core of its
own; ranks take turns on a few cores, as the kernel lets them (round robin);
or all compute at once, each the slower the more there are (processor
sharing).
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from .clock import Clock

#: Seconds of work that rounding may leave.
_NOTHING = 1e-12


@dataclass(frozen=True)
class Cores:
    """Which ranks compute on the same cores, and what they lose by it.

    Attributes:
        pools: For each rank, the number of the pool of cores it runs on.
        single: How many times as long a computation takes as its processor
            time, where no other rank of the pool computes.
        full: For each pool, how many times as long where all of its ranks
            compute.
    """

    pools: tuple[int, ...]
    single: float = 1.0
    full: tuple[float, ...] = ()

    def slowdown(self, pool: int, busy: int) -> float:
        """How many times as long a computation takes.

        Args:
            pool: In which it runs.
            busy: How many ranks of the pool compute.
        """
        full = self.full[pool] if self.full else 1.0
        return max(self.single, full * busy / self.pools.count(pool))


class Computing(Protocol):
    """The ranks, as those see them who give out cores."""

    def computed(self, rank: int, start: float) -> None:
        """Ends the computation of ``rank`` that had a core since ``start``.
        """

    def go_on(self, rank: int) -> None:
        """Has ``rank`` do what comes next, if it is not computing."""


class CorePolicy(Protocol):
    """Gives ranks their turns on the cores."""

    def compute(self, rank: int, seconds: float) -> None:
        """Begins a computation, or has it wait for a core.

        Args:
            rank: Which does nothing else until :meth:`Computing.computed`.
            seconds: More than 0.
        """


class OwnCores:
    """A core for every rank."""

    def __init__(self, clock: Clock, ranks: Computing) -> None:
        self._clock, self._ranks = clock, ranks

    def compute(self, rank: int, seconds: float) -> None:
        """Begins at once."""
        now = self._clock.now
        self._clock.at(now + seconds, self._end, rank, now)

    def _end(self, rank: int, start: float) -> None:
        self._ranks.computed(rank, start)
        self._ranks.go_on(rank)


class RoundRobin:
    """Ranks take turns on the cores that a group of them has.

    A rank that has a core keeps it while it has work, for a time slice if
    others wait; then the one that has waited longest gets the core.

    Args:
        clock: Of the simulation.
        ranks: That compute.
        cores: Of each group.
        sharing: Ranks of each group, in the order of their numbers.
        time_slice: In seconds.
    """

    def __init__(self, clock: Clock, ranks: Computing, cores: int,
                 sharing: int, time_slice: float) -> None:
        self._clock, self._ranks = clock, ranks
        self._cores, self._sharing = cores, sharing
        self._time_slice = time_slice
        self._taken: dict[int, int] = {}        # cores, by group
        self._waiting: dict[int, deque[tuple[int, float]]] = {}
        self._since: dict[int, float] = {}      # when a rank got its core

    def compute(self, rank: int, seconds: float) -> None:
        """Begins if a core is free, or else when it is the rank's turn."""
        group = rank // self._sharing
        if self._taken.get(group, 0) == self._cores:
            self._waiting.setdefault(group, deque()).append((rank, seconds))
        else:
            self._begin(group, rank, seconds)

    def _begin(self, group: int, rank: int, seconds: float) -> None:
        now = self._clock.now
        self._taken[group] = self._taken.get(group, 0) + 1
        self._since.setdefault(rank, now)
        self._clock.at(now + seconds, self._end, group, rank, now)

    def _end(self, group: int, rank: int, start: float) -> None:
        self._taken[group] -= 1
        taken = self._taken[group]
        self._ranks.computed(rank, start)
        if self._clock.now - self._since[rank] < self._time_slice:
            self._ranks.go_on(rank)
            if self._taken[group] > taken:      # by this rank
                return
        del self._since[rank]
        waiting = self._waiting.get(group)
        if waiting:
            self._begin(group, *waiting.popleft())
        self._ranks.go_on(rank)


@dataclass
class _Pool:
    """Who computes on a pool of cores: seconds left, and start, by rank."""

    number: int
    left: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    since: float = 0.0          # when the seconds left were counted last
    changes: int = 0


class ProcessorSharing:
    """All ranks compute at once, each as fast as the others allow.

    Args:
        clock: Of the simulation.
        ranks: That compute.
        cores: Of the ranks.
    """

    def __init__(self, clock: Clock, ranks: Computing, cores: Cores) -> None:
        self._clock, self._ranks, self._cores = clock, ranks, cores
        self._pools = {pool: _Pool(pool) for pool in cores.pools}

    def compute(self, rank: int, seconds: float) -> None:
        """Begins at once; from now on the others are slower."""
        pool = self._pools[self._cores.pools[rank]]
        self._count(pool)
        pool.left[rank] = seconds
        pool.starts[rank] = self._clock.now
        self._await_next(pool)

    def _count(self, pool: _Pool) -> None:
        """Subtracts what was done since the last time."""
        now = self._clock.now
        if pool.left and now > pool.since:
            done = (now - pool.since) / self._slowdown(pool)
            for rank in pool.left:
                pool.left[rank] -= done
        pool.since = now

    def _await_next(self, pool: _Pool) -> None:
        """Wakes up when the first rank is through, if none comes or goes."""
        pool.changes += 1
        if pool.left:
            seconds = min(pool.left.values()) * self._slowdown(pool)
            self._clock.at(max(self._clock.now + seconds, self._clock.now),
                           self._end, pool, pool.changes)

    def _end(self, pool: _Pool, changes: int) -> None:
        """Ends the computations with nothing left."""
        if changes != pool.changes:
            return              # somebody came or went: another end counts
        self._count(pool)
        most = min(pool.left.values()) + _NOTHING
        through = [rank for rank, left in pool.left.items() if left <= most]
        starts = [pool.starts.pop(rank) for rank in through]
        for rank in through:
            del pool.left[rank]
        for rank, start in zip(through, starts, strict=True):
            self._ranks.computed(rank, start)
        for rank in through:
            self._ranks.go_on(rank)
        self._await_next(pool)

    def _slowdown(self, pool: _Pool) -> float:
        return self._cores.slowdown(pool.number, len(pool.left))


def policy_of(clock: Clock, ranks: Computing, cores: int, sharing: int,
              time_slice: float) -> CorePolicy:
    """Round robin, where anybody would ever have to wait.

    Args:
        clock: Of the simulation.
        ranks: That compute.
        cores: Of each group of ranks.
        sharing: Ranks of each group.
        time_slice: In seconds.
    """
    if sharing <= cores:
        return OwnCores(clock, ranks)
    return RoundRobin(clock, ranks, cores, sharing, time_slice)
