"""How long computations take that share cores.

Two models: ranks take turns on a few cores, as the kernel lets them (round
robin); or all compute at once, each the slower the more there are (processor
sharing).
"""
from __future__ import annotations

import collections
import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .clock import Clock
from .cluster import Cluster

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
        """How many times as long a computation takes of ``busy`` at a time."""
        full = self.full[pool] if self.full else 1.0
        return max(self.single, full * busy / self._sizes[pool])

    @functools.cached_property
    def _sizes(self) -> Mapping[int, int]:
        """How many ranks each pool has."""
        return collections.Counter(self.pools)


class Computing(Protocol):
    """The ranks that compute, as :class:`RoundRobin` and others see them."""

    def computed(self, rank: int, start: float) -> None:
        """Ends the computation for which a rank had a core since ``start``."""

    def go_on(self, rank: int) -> None:
        """Has ``rank`` do what comes next, if it is not computing."""


class RoundRobin:
    """Ranks take turns on the cores that a group of them has.

    A rank that has a core keeps the core while it has work, for a time slice
    if others wait; then the one that has waited longest gets the core.

    Args:
        clock: Of the simulation.
        ranks: That compute.
        cluster: Whose ``cores``, ``sharing`` and ``time_slice`` count.
    """

    def __init__(self, clock: Clock, ranks: Computing, cluster: Cluster
                 ) -> None:
        self._clock, self._ranks = clock, ranks
        self._cores, self._sharing = cluster.cores, cluster.sharing
        self._time_slice = cluster.time_slice
        self._taken: dict[int, int] = {}        # cores, by group
        self._waiting: dict[int, deque[tuple[int, float]]] = {}
        self._since: dict[int, float] = {}      # when a rank got its core

    def compute(self, rank: int, seconds: float) -> None:
        """Begins a computation now, or when it is the rank's turn."""
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
    """Computations on a pool of cores: seconds left and start, by rank."""

    number: int
    left: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    since: float = 0.0          # when the seconds left were counted last
    changes: int = 0


class ProcessorSharing:
    """All ranks compute at once, each as fast as the others allow."""

    def __init__(self, clock: Clock, ranks: Computing, cores: Cores) -> None:
        self._clock, self._ranks, self._cores = clock, ranks, cores
        self._pools = {pool: _Pool(pool) for pool in cores.pools}

    def compute(self, rank: int, seconds: float) -> None:
        """Begins a computation now, which makes the others slower."""
        pool = self._pools[self._cores.pools[rank]]
        self._count(pool)
        pool.left[rank] = seconds
        pool.starts[rank] = self._clock.now
        self._await_next(pool)

    def _count(self, pool: _Pool) -> None:
        """Subtracts the seconds done since the last call."""
        now = self._clock.now
        if pool.left and now > pool.since:
            done = (now - pool.since) / self._slowdown(pool)
            for rank in pool.left:
                pool.left[rank] -= done
        pool.since = now

    def _await_next(self, pool: _Pool) -> None:
        """Calls :meth:`_end` when the first rank will be through."""
        pool.changes += 1
        if pool.left:
            seconds = min(pool.left.values()) * self._slowdown(pool)
            self._clock.at(max(self._clock.now + seconds, self._clock.now),
                           self._end, pool, pool.changes)

    def _end(self, pool: _Pool, changes: int) -> None:
        if changes != pool.changes:
            return              # a rank came or went: another end counts
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
