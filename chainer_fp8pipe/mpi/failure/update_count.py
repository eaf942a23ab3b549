"""Counts this rank's updates, and how long they usually take."""
from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Hashable

# Durations that are remembered of each kind of update.
_LAST = 64


class UpdateCount:
    """The updates that this rank has finished so far.

    Attributes:
        total: How many; written by the main thread alone.
    """

    def __init__(self) -> None:
        self.total = 0
        self._latest: dict[Hashable, float] = {}
        self._durations: dict[Hashable, collections.deque[float]] = {}

    def finished(self, kind: Hashable) -> None:
        """Counts an update.

        Args:
            kind: Updates of one kind follow each other at regular times: a
                communicator's of one model, for example.
        """
        now = time.monotonic()
        if kind in self._latest:
            self._durations.setdefault(
                kind, collections.deque(maxlen=_LAST)).append(
                    now - self._latest[kind])
        self._latest[kind] = now
        self.total += 1

    def usual_seconds(self) -> float:
        """The median duration, of the kind of update that takes longest."""
        return max((statistics.median(tuple(durations)) for durations
                    in tuple(self._durations.values())), default=0.0)


#: Of this process.
updates = UpdateCount()
