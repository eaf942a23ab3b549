"""Times actions of all ranks, in turns."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpi4py import MPI


class Times(NamedTuple):
    """Seconds until the last rank was through, once per repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Shortest and longest, in milliseconds."""
        return f'{min(self.seconds) * 1e3:.4g} - {max(self.seconds) * 1e3:.4g}'


def interleaved(comm: MPI.Comm, actions: Sequence[Callable[[], object]],
                repeats: int, tick: Callable[[], object] = lambda: None
                ) -> list[Times]:
    """Times several actions in turns, so that a slow minute hits them all.

    Args:
        comm: The ranks; all begin an action together.
        actions: Every rank calls them in this order.
        repeats: How often, after once for warming up.
        tick: Called after each action, on every rank.

    Returns:
        The times of each action; the same on all ranks.
    """
    found: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for times, action in zip(found, actions, strict=True):
            comm.Barrier()
            start = time.perf_counter()
            action()
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat:
                times.append(seconds)
            tick()
    return [Times(tuple(times)) for times in found]
