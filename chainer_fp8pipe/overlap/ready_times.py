"""When gradients become final, from update to update."""
from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Mapping, Sequence

#: Updates whose buckets are sent early, before the first new look at them;
#: the next one comes after twice as many, and so on.
FIRST = 5
#: The last ones count.
KEPT = 20


class ReadyTimes:
    """Times of one model's backward passes.

    A backward pass takes longer beside an exchange than without one, and
    what is sent when changes how long.  Where it is thought to be shorter
    than it is, the wire has nothing to carry when the time comes for a bucket
    that is not there yet; so more than one look at it is worth while.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._kept: collections.deque[Mapping[str, float]] = (
            collections.deque(maxlen=KEPT))
        self._updates = 0
        self._next = FIRST

    def begin(self) -> None:
        """A pass begins."""
        self._last = {}

    def note(self, name: str) -> None:
        """A gradient is final."""
        self._last[name] = time.perf_counter()

    def keep(self, early: bool) -> bool:
        """An update is over.

        Args:
            early: Buckets were sent while its last pass went on.

        Returns:
            Whether it is time for a look: after each update without early
            buckets, and after :data:`FIRST`, twice, four times, ... as many
            with them.
        """
        if not early or not self._updates:
            self._kept.clear()
        first = min(self._last.values(), default=0.0)
        self._kept.append({name: moment - first
                           for name, moment in self._last.items()})
        if not early:
            self._updates, self._next = 0, FIRST
            return True
        self._updates += 1
        if self._updates < self._next:
            return False
        self._next *= 2
        return True

    def usual(self, names: Sequence[str]) -> list[float]:
        """Medians, in seconds after the first gradient; infinity: never."""
        return [statistics.median_high(times.get(name, math.inf)
                                       for times in self._kept)
                for name in names]
