"""In which order buckets are sent while backward passes go on."""
from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..allreduce.engine import PARTS
from ..exchange.buckets import BucketNames

#: Updates with early buckets before their times are used for a new order; the
#: next time after twice as many, and so on.
FIRST = 5
#: Updates whose times count, the last ones.
KEPT = 20


class Slice(NamedTuple):
    """A part of a bucket.

    Attributes:
        bucket: The bucket's number.
        until: Where the part ends, in parts of
            :data:`~chainer_fp8pipe.allreduce.engine.PARTS`; it begins
            where the bucket's last one ended.
    """

    bucket: int
    until: int = PARTS


class SendOrder:
    """Buckets of a model, and the order in which slices of them are sent.

    The order is reckoned from the times at which gradients became final, the
    same on all ranks.

    Attributes:
        sizes: Elements of every parameter, by name.
        buckets: As :func:`.divide` gives them.
        slices: In the order in which they are sent.
        times: When gradients became final.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.buckets: tuple[BucketNames, ...] = ()
        self.slices: list[Slice] = []
        self.times = ReadyTimes()
        self._bucket_of: dict[str, int] = {}

    def follow(self, sizes: dict[str, int], buckets: tuple[BucketNames, ...]
               ) -> None:
        """Starts anew with other parameters."""
        self.sizes = dict(sizes)
        self.buckets = buckets
        self.slices = list(map(Slice, range(len(buckets))))
        self.times = ReadyTimes()
        self._bucket_of = {name: number
                           for number, names in enumerate(buckets)
                           for name in names}

    def bucket_of(self, name: str) -> int:
        """The number of a parameter's bucket; -1 for none."""
        return self._bucket_of.get(name, -1)

    def usual_times(self) -> list[float]:
        """When each gradient is final, in a fixed order of their names.

        Returns:
            Seconds after the first one; infinity for what was never final.
        """
        return self.times.usual(sorted(self.sizes))

    def choose(self, usual: Sequence[float], seconds: float | None,
               chunks: Callable[[int], int]) -> None:
        """Chooses the order of slices.

        Args:
            usual: As :meth:`usual_times` returns them, the same on all
                ranks.
            seconds: How long all buckets together travel, if the next
                forward pass waits for each of them; None: their order is to
                be that in which they were finished.
            chunks: Into how many chunks so many elements are cut.
        """
        times = dict(zip(sorted(self.sizes), usual, strict=True))
        if seconds is None or not self.buckets:
            self.slices = finished_first(self.buckets, times)
            return
        sizes = [sum(self.sizes[name] for name in names)
                 for names in self.buckets]
        each = seconds / sum(sizes)
        self.slices = needed_first(
            self.buckets, times, [each * size for size in sizes],
            list(map(chunks, sizes)))


class ReadyTimes:
    """When gradients become final in one model's backward passes.

    A backward pass takes longer beside an exchange than without one, by an
    amount that depends on the order of buckets.  With times that are too
    short, the wire stands idle until a bucket is complete; so the times are
    measured, and the order chosen, more than once.
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
            Whether to choose a new order: after each update without early
            buckets, and after :data:`FIRST`, twice, four times, ... as many
            with early buckets.
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


def finished_first(buckets: Sequence[BucketNames], finals: Mapping[str, float]
                   ) -> list[Slice]:
    """Buckets in the order in which a backward pass finishes them.

    Args:
        buckets: Whose order is wanted.
        finals: When gradients became final, in seconds, by the parameter's
            name.

    Returns:
        Whole buckets; last come those that were never complete.
    """
    ready = _ready(buckets, finals)
    return [Slice(number) for number in sorted(
        range(len(buckets)), key=lambda number: (ready[number], number))]


def needed_first(buckets: Sequence[BucketNames], finals: Mapping[str, float],
                 seconds: Sequence[float], chunks: Sequence[int]
                 ) -> list[Slice]:
    """The order in which the next forward pass waits least.

    A forward pass needs first what the backward pass finishes last.  So of
    the final buckets the last one travels first, and interrupts a bucket that
    is on its way, between two chunks (the priorities of Jayarajan et al.,
    "Priority-based Parameter Propagation for Distributed DNN Training",
    2019).  The order is computed here, from times that are the same on all
    ranks: ranks that decided by themselves would decide differently.

    Args:
        buckets: Whose order is wanted.
        finals: As for :func:`finished_first`.
        seconds: How long each bucket travels.
        chunks: In how many chunks, at least 1 each.

    Returns:
        Slices; buckets that were never complete come last, as they are.
    """
    ready = _ready(buckets, finals)
    events = sorted((ready[number], number) for number in range(len(buckets))
                    if ready[number] < math.inf)
    sent = [0] * len(buckets)
    final: list[int] = []           # not yet sent; the last one is urgent
    slices: list[Slice] = []
    now: float = 0
    while events or final:
        while events and (events[0][0] <= now or not final):
            time, number = events.pop(0)
            now = max(now, time)
            final.append(number)
        number = final[-1]
        parts = min(chunks[number], PARTS)
        sent[number] += 1
        now += seconds[number] / parts
        if sent[number] == parts:
            final.pop()
        # Rounded up, so that the executor finds the same number of chunks.
        _append(slices, Slice(number, -(-PARTS * sent[number] // parts)))
    return slices + [Slice(number) for number in range(len(buckets))
                     if ready[number] == math.inf]


def _append(slices: list[Slice], part: Slice) -> None:
    """A slice more, or a longer one in the last one's place."""
    if slices and slices[-1].bucket == part.bucket:
        slices.pop()
    slices.append(part)


def _ready(buckets: Sequence[BucketNames], finals: Mapping[str, float]
           ) -> list[float]:
    """When each bucket was complete; infinity if never."""
    return [max(finals.get(name, math.inf) for name in names)
            for names in buckets]
