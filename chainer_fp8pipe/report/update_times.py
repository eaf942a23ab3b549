"""One rank's updates between two writes of the record, as they go by."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import numpy

from .events import Event
from .record import (
    COMMUNICATION,
    FIRST,
    PHASES,
    REGULAR,
    SLOW,
    RankInterval,
    RecordedUpdate,
    Spread,
)
from .stream import EventStream, MakesEvent, Recording

#: Updates that a rank offers as slow ones, and how many are kept of those.
_OFFERED, _KEPT = 6, 2
#: An update is slow if it takes so many times as long as the median.
_SLOW = 1.25


class KeptEvents(NamedTuple):
    """One rank's events of an update.

    Attributes:
        iteration: The update.
        why: See :class:`.RecordedUpdate`.
        seconds: That the update took.
        events: On the rank's own clock.
    """

    iteration: int
    why: str
    seconds: float
    events: list[Event]


class _Lap(NamedTuple):
    """From the end of an update to the end of the next."""

    iteration: int
    end: float
    busy: float                 # from the update's begin to its end
    seconds: dict[str, float]   # by section, since the stream began
    outside: dict[str, float]   # the same when the update began
    hidden: dict[str, float]
    bytes: tuple[int, int, int]     # gradients; to stages: sent, whole


class UpdateTimes:
    """Notes each update's times, and keeps the events of some updates.

    Args:
        stream: Where updates write what they do.
        rank: Of this process.
        now: When the first step begins, by ``time.monotonic``.
        iteration: Updates done so far.
    """

    def __init__(self, stream: EventStream, rank: int, now: float,
                 iteration: int) -> None:
        self._stream, self._rank = stream, rank
        self.recording = Recording(rank, 0.0)
        stream.keep(self.recording)
        self.update_begins(now)
        self._before = self._lap(iteration, now)
        self.choose(())
        self._clear()

    def choose(self, regular: Collection[int]) -> None:
        """Says which updates' events are kept as regular ones, by number."""
        self._regular = frozenset(regular)

    def _clear(self) -> None:
        self._laps: list[_Lap] = []
        self._kept: list[KeptEvents] = []
        self._slow: list[KeptEvents] = []

    def end(self) -> None:
        """Notes nothing any more."""
        self._stream.keep_no_more(self.recording)

    def update_begins(self, now: float) -> None:
        """An update begins; ``now`` is that of ``time.monotonic``.

        What lies between updates, such as an evaluation, is none of one.
        """
        self._begin, self._outside = now, dict(self._stream.seconds)

    def update_ends(self, now: float, iteration: int,
                    is_first: bool | None) -> None:
        """The update is done.

        Args:
            now: By ``time.monotonic``.
            iteration: Its number.
            is_first: Whether it is one of the first of its kind; None: it is
                like no other, and its events are not kept.
        """
        begin, busy = self._begin, now - self._begin
        taken = self.recording.take()
        self._laps.append(self._lap(iteration, now))
        if is_first is None:
            return
        if is_first or iteration in self._regular:
            self._kept.append(KeptEvents(
                iteration, FIRST if is_first else REGULAR, busy,
                self._since(begin, taken)))
        elif len(self._slow) < _OFFERED or busy > self._slow[-1].seconds:
            self._slow.append(KeptEvents(iteration, SLOW, busy,
                                         self._since(begin, taken)))
            self._slow.sort(key=lambda kept: -kept.seconds)
            del self._slow[_OFFERED:]

    def summary(self, start: int) -> tuple[RankInterval | None,
                                           list[KeptEvents]]:
        """What this rank did in an interval, which ends now; None: nothing.

        Args:
            start: Number of the start.

        Returns:
            Also the events that were kept, and those offered as slow ones.
        """
        if not self._laps:
            return None, []
        laps = [self._before, *self._laps]
        self._before = laps[-1]
        steps = numpy.diff([lap.end for lap in laps])
        busy = numpy.array([lap.busy for lap in laps[1:]])
        sections = {name: numpy.array([
            lap.seconds[name] - lap.outside.get(name, 0.0)
            if name in lap.seconds else 0.0 for lap in laps[1:]])
            for name in laps[-1].seconds}
        waits = sum((sections[name] for name in COMMUNICATION
                     if name in sections), numpy.zeros(len(steps)))
        named = sum(sections.values(), numpy.zeros(len(steps)))
        means = {name: float(values.mean())
                 for name, values in sections.items()}
        # Measuring takes time, too, so that sections may add up to more than
        # the update.
        means['other'] = max(float((busy - named).mean()), 0.0)
        means['between'] = float((steps - busy).mean())
        count = len(steps)
        interval = RankInterval(
            start, self._rank, laps[1].iteration, laps[-1].iteration,
            spread(steps), spread(steps - waits),
            {name: means[name] for name in PHASES if means.get(name)},
            {name: float(values.mean()) for name, values in _differences(
                [lap.hidden for lap in laps]).items() if values.any()},
            *((after - before) / count for before, after in zip(
                laps[0].bytes, laps[-1].bytes, strict=True)))
        typical = float(numpy.median(busy))
        kept = [*self._kept, *(one for one in self._slow
                               if one.seconds > _SLOW * typical)]
        self._clear()
        return interval, kept

    def _since(self, begin: float, taken: list[MakesEvent]) -> list[Event]:
        """Events of an update: those that have not ended before it began."""
        return [event for event in self.recording.made(taken)
                if event.end > begin or event.lane]

    def _lap(self, iteration: int, now: float) -> _Lap:
        stream = self._stream
        return _Lap(iteration, now, now - self._begin, dict(stream.seconds),
                    self._outside, dict(stream.hidden), (
                        stream.bytes_sent, stream.stage_bytes,
                        stream.stage_arrays))


def together(start: int, everyone: dict[int, list[KeptEvents]]
             ) -> list[RecordedUpdate]:
    """The updates that all ranks have kept, the slowest of the slow ones.

    Args:
        start: Number of the start.
        everyone: What each rank has kept, by rank.
    """
    by_update: dict[int, list[KeptEvents]] = defaultdict(list)
    for kept in everyone.values():
        for one in kept:
            by_update[one.iteration].append(one)
    whole = {iteration: found for iteration, found in by_update.items()
             if len(found) == len(everyone)}
    slow = sorted((iteration for iteration, found in whole.items()
                   if any(one.why == SLOW for one in found)),
                  key=lambda iteration: -max(
                      one.seconds for one in whole[iteration]))
    for iteration in slow[_KEPT:]:
        del whole[iteration]
    return [RecordedUpdate(
        start, iteration, found[0].why, tuple(
            event._replace(iteration=iteration)
            for one in found for event in one.events))
        for iteration, found in sorted(whole.items())]


def spread(numbers: numpy.ndarray) -> Spread:
    """Quartiles, mean and largest of some numbers, at least one."""
    low, median, high = numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return Spread(low, median, high, float(numbers.mean()),
                  float(numbers.max()))


def _differences(totals: list[dict[str, float]]) -> dict[str, numpy.ndarray]:
    """From each total to the next, by name."""
    return {name: numpy.diff([total.get(name, 0.0) for total in totals])
            for name in totals[-1]}
