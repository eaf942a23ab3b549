"""A cluster in numbers: what messages between its ranks take."""
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Hop(NamedTuple):
    """A link on the route of a message.

    Attributes:
        link: Tells the link from all others.
        rate: Bytes per second.
        latency: Seconds from the end of this link to the next one.
        burst: Bytes that pass at once if the link was idle.
    """

    link: Hashable
    rate: float
    latency: float
    burst: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Ranks, the links between them, and what messages cost.

    A message of n bytes between two hosts takes ``latency + n / rate`` if it
    meets no other; links carry messages in the order in which they come, both
    directions at a time.  On a torus it crosses one link after the other
    (columns first, the shorter way round), each of them with its latency,
    without being stored in between.

    Attributes:
        hosts: Per rank, the number of its host.
        rate: Bytes per second of a host's port into the switch and out of
            it; on a torus of each link and direction.
        latency: Seconds of a message from one host to another.
        torus: Rows and columns, if the hosts are wired as a torus, with
            one link per pair of neighbours; None for a star around a switch.
        message_cost: Seconds for which a rank is busy with a message, both
            when it sends and when it receives.
        byte_cost: Seconds for which a rank is busy with each byte of a
            message, at either end.
        local_rate: Bytes per second between ranks of one host; each pair
            has a link of its own.
        local_latency: Seconds of a message between ranks of one host.
        cores: Of each group of ranks that share cores.
        sharing: Ranks in such a group, in the order of their numbers; as many
            as ``cores`` if no rank has to wait.
        time_slice: Seconds for which a rank with work to do keeps a core that
            others wait for (ignored in estimates of an all-reduce).
        in_switch: Hosts that are in the switch: no port slows them down.
        burst: Bytes that a link which was idle long enough passes at once,
            before its rate counts: the size of a token bucket (ignored in
            estimates of an all-reduce).
        trunk: Bytes per second of all messages between hosts of a star
            together: what a switch, or a link that hosts share, passes on.
    """

    hosts: Sequence[int]
    rate: float
    latency: float
    torus: tuple[int, int] | None = None
    message_cost: float = 0.0
    byte_cost: float = 0.0
    local_rate: float = math.inf
    local_latency: float = 0.0
    cores: int = 1
    sharing: int = 1
    time_slice: float = 0.0
    in_switch: frozenset[int] = frozenset()
    burst: float = 0.0
    trunk: float = math.inf

    def __post_init__(self) -> None:
        if self.torus is None:
            return
        rows, columns = self.torus
        if any(not 0 <= host < rows * columns for host in self.hosts):
            raise ValueError(f'a {rows} x {columns} torus has no host '
                             f'{max(self.hosts)}')

    @classmethod
    def pairs(cls, ranks: int, rate: float, latency: float) -> Cluster:
        """Ranks with a link of ``rate`` from each one to each other one."""
        return cls((0,) * ranks, math.inf, 0.0, local_rate=rate,
                   local_latency=latency)

    def route(self, source: int, target: int) -> tuple[Hop, ...]:
        """The links from one rank to another one, in order."""
        first, last = self.hosts[source], self.hosts[target]
        if first == last:
            return (Hop(('memory', source, target), self.local_rate,
                        self.local_latency),)
        if self.torus is None:
            shared = ((Hop(('trunk',), self.trunk, 0.0),)
                      if self.trunk < math.inf else ())
            return (Hop(('out', first), self._port(first), self.latency,
                        self.burst), *shared,
                    Hop(('in', last), self._port(last), 0.0, self.burst))
        way = self._way(first, last)
        return tuple(Hop(pair, self.rate, self.latency, self.burst)
                     for pair in zip(way, way[1:], strict=False))

    def _port(self, host: int) -> float:
        return math.inf if host in self.in_switch else self.rate

    def _way(self, first: int, last: int) -> list[int]:
        assert self.torus is not None
        rows, columns = self.torus
        row, column = divmod(first, columns)
        last_row, last_column = divmod(last, columns)
        return [first,
                *(row * columns + place
                  for place in _round(column, last_column, columns)),
                *(place * columns + last_column
                  for place in _round(row, last_row, rows))]


def _round(place: int, last: int, count: int) -> list[int]:
    """The places after ``place`` up to ``last`` on a ring, the shorter way."""
    ahead = (last - place) % count
    if 2 * ahead > count:
        ahead -= count
    step = 1 if ahead > 0 else -1
    return [(place + way) % count for way in range(step, ahead + step, step)]
