"""Simulated time: what happens when, one thing after the other."""
from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls functions in the order of their times.

    Of functions with the same time, the one that was asked for first is
    called first, so that a simulation always comes out alike.

    Attributes:
        now: Simulated seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ticket = self._tickets = 0
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []

    def at(self, time: float, function: Callable[..., None],
           *arguments: Any) -> None:
        """Has ``function(*arguments)`` called at ``time``.

        Args:
            time: In seconds, not before :attr:`now`.
            function: Changes the simulation.
            arguments: Of the function.
        """
        self._tickets += 1
        heapq.heappush(self._events,
                       (time, self._tickets, function, arguments))

    def ticket(self) -> int:
        """Reserves the place in the order that a call of :meth:`at` has now.

        Most of what could be waited for is waited for by nobody; a ticket
        costs less than an event.
        """
        self._tickets += 1
        return self._tickets

    def at_ticket(self, time: float, ticket: int,
                  function: Callable[..., None], *arguments: Any) -> bool:
        """Has a function called in the place that was reserved for it.

        Args:
            time: In seconds.
            ticket: What :meth:`ticket` gave.
            function: Changes the simulation.
            arguments: Of the function.

        Returns:
            Whether it will be called: not if the clock is past that place.
        """
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
