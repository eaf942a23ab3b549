"""Clocks of several ranks: how far one is ahead of another.

A rank asks another for the time and gets it back.  The answer was true at
some moment between question and answer; if half of the round trip has passed
until then, the clocks differ by what the two show.  They differ by that to
half of the round trip at most, however unequal the two ways are (Cristian,
"Probabilistic clock synchronization", 1989).  The shortest of many round trips
says most.
"""
from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from .record import ClockReading


class RoundTrip(NamedTuple):
    """A question for the time and its answer.

    Attributes:
        asked: When the question left, by the clock of who asks.
        answered: What the other clock showed.
        received: When the answer came, by the clock of who asks.
    """

    asked: float
    answered: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds that the other clock is ahead."""
        return self.answered - (self.asked + self.received) / 2

    @property
    def error(self) -> float:
        """The offset is right to so many seconds."""
        return (self.received - self.asked) / 2


def best_trip(trips: Iterable[RoundTrip]) -> RoundTrip:
    """The shortest round trip, which bounds the offset best.

    Raises:
        ValueError: There is none.
    """
    return min(trips, key=lambda trip: trip.error)


class ClockLine:
    """A rank's clock beside rank 0's, from readings at several times.

    Between two readings the offset goes from one to the other along a
    straight line; before the first and after the last it stays.

    Args:
        readings: Of one rank in one start; at least one.
    """

    def __init__(self, readings: Iterable[ClockReading]) -> None:
        self._readings = sorted(readings, key=lambda one: one.seconds)
        # By the rank's own clock, which is what is asked for.
        self._own = [one.seconds + one.offset for one in self._readings]

    def on_rank_0(self, own: float) -> float:
        """What rank 0's clock shows when the rank's own shows ``own``.

        Both count from the start on rank 0's clock.
        """
        return own - self.offset(own)

    def offset(self, own: float) -> float:
        """Seconds that the rank's clock is ahead when it shows ``own``."""
        readings, place = self._readings, bisect.bisect(self._own, own)
        if not 0 < place < len(readings):
            return readings[min(place, len(readings) - 1)].offset
        before, after = readings[place - 1:place + 1]
        passed = self._own[place] - self._own[place - 1]
        part = (own - self._own[place - 1]) / passed if passed else 0.0
        return before.offset + part * (after.offset - before.offset)

    def expected(self, seconds: float) -> float:
        """The offset that the last two readings let expect at a time."""
        *_, last = readings = self._readings
        if len(readings) < 2 or last.seconds == readings[-2].seconds:
            return last.offset
        before = readings[-2]
        rate = (last.offset - before.offset) / (last.seconds - before.seconds)
        return last.offset + rate * (seconds - last.seconds)


def clock_lines(readings: Iterable[ClockReading]) -> dict[int, ClockLine]:
    """The line of each rank of which there are readings, of one start."""
    by_rank: dict[int, list[ClockReading]] = {}
    for reading in readings:
        by_rank.setdefault(reading.rank, []).append(reading)
    return {rank: ClockLine(found) for rank, found in by_rank.items()}
