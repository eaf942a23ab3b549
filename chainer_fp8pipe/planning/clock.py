"""Simulated time: what happens when, one thing after the other."""
from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls functions in the order of their times.

    Functions of the same time are called in the order in which they were
    asked for, so that a simulation always comes out alike.

    Attributes:
        now: Simulated seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ticket = self._tickets = 0
        self._events: list[tuple[float, int, Callable[..., object], Any]] = []

    def at(self, time: float, function: Callable[..., object],
           *arguments: Any) -> None:
        """Has ``function(*arguments)`` called at ``time``, in seconds."""
        self._tickets += 1
        heapq.heappush(self._events,
                       (time, self._tickets, function, arguments))

    def ticket(self) -> int:
        """Reserves the place among equal times that :meth:`at` would get now.

        A ticket costs less than an event, and most events are not waited for.
        """
        self._tickets += 1
        return self._tickets

    def at_ticket(self, time: float, ticket: int,
                  function: Callable[..., object], *arguments: Any) -> bool:
        """As :meth:`at`, in the place of a ticket; False if that is past."""
        if (time, ticket) <= (self.now, self._ticket):
            return False
        heapq.heappush(self._events, (time, ticket, function, arguments))
        return True

    def run(self) -> None:
        """Calls functions until none is left."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, self._ticket, function, arguments = pop(events)
            function(*arguments)
