"""Hosts on a grid that goes round, with cables between neighbours only."""
from __future__ import annotations

from .network import START_UP, Network
from .speed import End, Link

_OWN = 'own0'


class Torus(Network):
    """A physical X x Y torus: each pair of neighbours has a cable.

    Host ``node{x * Y + y}`` is at (x, y).  Where a dimension has 2 hosts,
    the neighbours on both sides are the same host: there is one cable to it,
    not two, as one address can only be reached by one way.  In a dimension
    of 1 there is none.

    A host's address is on a device of its own without a cable; its routes
    lead to each neighbour's address over the cable to it.  Besides, all
    hosts have ``eth0`` on a bridge that is not slowed down: for start-up,
    and for the few messages, as of a barrier, between hosts that are not
    neighbours.  :meth:`counters` shows that no more than those went there.
    Hosts forward nothing.

    Args:
        x, y: Hosts per dimension.
        rate: Of each cable, in bit/s in each direction.
    """

    interface = _OWN

    def __init__(self, x: int, y: int, rate: float) -> None:
        if x < 1 or y < 1:
            raise ValueError(f'a torus of {x} x {y} has no hosts')
        self.shape = x, y
        self.kind = f'physical torus of {x} x {y} hosts'
        super().__init__([f'node{index}' for index in range(x * y)], rate)

    def address(self, host: int) -> str:
        return f'10.78.0.{host + 1}'

    def neighbours(self, host: int) -> dict[int, str]:
        """The numbers of a host's neighbours, and its device for each."""
        peers = [first + second - host for first, second in self._pairs()
                 if host in (first, second)]
        return {peer: f'to{peer}' for peer in peers}

    def _pairs(self) -> list[tuple[int, int]]:
        columns, rows = self.shape
        pairs = set()
        for x in range(columns):
            for y in range(rows):
                here = x * rows + y
                for other in ((x + 1) % columns * rows + y,
                              x * rows + (y + 1) % rows):
                    if other != here:
                        pairs.add((min(here, other), max(here, other)))
        return sorted(pairs)

    def _build(self) -> None:
        self._build_bridge()
        numbers = self.spaces.numbers
        self._ip(None, [
            f'link add to{second} netns {numbers[first]} type veth '
            f'peer name to{first} netns {numbers[second]}'
            for first, second in self._pairs()])
        for index, host in enumerate(self.hosts):
            self._build_host(index, host)
        self.links = [
            Link(f'{self.hosts[first]}-{self.hosts[second]}',
                 End(self.hosts[first], self.address(first)),
                 End(self.hosts[second], self.address(second)))
            for first, second in self._pairs()]

    def _build_host(self, index: int, host: str) -> None:
        own, neighbours = self.address(index), self.neighbours(index)
        # UCX uses a device only if it is connected to something, and has a
        # route to the peer that is as exact as any: hence the second end,
        # and a second route, which no packet follows, as its metric is worse.
        lines = [f'link add {_OWN} type veth peer name {_OWN}-end',
                 f'addr add {own}/32 dev {_OWN}', f'link set {_OWN} up',
                 f'link set {_OWN}-end up']
        lines += [f'link set {device} up' for device in neighbours.values()]
        for peer in range(len(self.hosts)):
            if peer != index:
                route = f'route add {self.address(peer)}/32 src {own} dev'
                device = neighbours.get(peer, START_UP)
                lines += [f'{route} {device}', f'{route} {_OWN} metric 1000']
        self._ip(host, lines)
        self._shape(host, list(neighbours.values()))
