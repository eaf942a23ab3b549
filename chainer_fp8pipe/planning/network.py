"""Messages on the links of a cluster.

A link carries messages in the order in which they come.  On a route of several
links the head of a message is on the second link while its tail is on the
first (cut-through).  A link that was idle passes a burst at once: a token
bucket.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from .clock import Clock
from .cluster import Cluster, Hop


class _Message(NamedTuple):
    size: float
    route: tuple[Hop, ...]
    arrived: Callable[..., object]
    arguments: tuple[Any, ...]


class Network:
    """The links of a cluster in simulated time.

    Attributes:
        busy: By link, the seconds in which it carried something.
    """

    def __init__(self, clock: Clock, cluster: Cluster) -> None:
        self.busy: dict[Hashable, float] = {}
        self._clock = clock
        self._cluster = cluster
        # When each link has passed all that came to it so far.
        self._free: dict[Hashable, float] = {}
        self._routes: dict[tuple[int, int], tuple[Hop, ...]] = {}

    def send(self, source: int, target: int, size: float,
             arrived: Callable[..., object], *arguments: Any
             ) -> tuple[float, float]:
        """Sends a message of ``size`` bytes now from one rank to another.

        Calls ``arrived(*arguments)`` when the whole message is there.

        Returns:
            When the first link begins with the message, and when the whole
            message is on that link.
        """
        route = self._routes.get((source, target))
        if route is None:
            route = self._cluster.route(source, target)
            self._routes[source, target] = route
        return self._pass(_Message(size, route, arrived, arguments), 0, 0.0)

    def _pass(self, message: _Message, index: int, tail: float
              ) -> tuple[float, float]:
        """Puts a message on the link of its route where its head is now.

        The message's end reaches this link at ``tail``, and does not pass
        the link before.
        """
        now, size = self._clock.now, message.size
        link, rate, latency, burst = message.route[index]
        # What a link may pass at once is time that it is ahead of its rate.
        ahead, on_link = burst / rate, size / rate
        begin = max(now - ahead, self._free.get(link, -ahead))
        free = max(begin + on_link, tail - ahead)
        self._free[link] = free
        start, end = max(now, begin), max(free, now, tail)
        self.busy[link] = self.busy.get(link, 0.0) + on_link
        if index + 1 < len(message.route):
            self._clock.at(start + latency, self._pass, message, index + 1,
                           end + latency)
        else:
            self._clock.at(end + latency, message.arrived,
                           *message.arguments)
        return start, end
