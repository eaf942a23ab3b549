"""Networks of virtual hosts: what their links carry, and a torus.

Benchmarks call :func:`begin` first: the rest runs in namespaces of its own,
see chainer_fp8pipe/launcher/virtual_hosts.py.
"""
from __future__ import annotations

import sys

from chainer_fp8pipe.launcher.virtual_hosts import (
    BURST,
    INTERFACE,
    VirtualHosts,
    enter,
)

_CONTROL = '/proc/sys/net/ipv4/tcp_congestion_control'
#: Of an Ethernet frame's bytes, those that TCP carries.
_PAYLOAD = 1448 / 1514


def begin() -> None:
    """Goes on where there can be virtual hosts; ends in a line if nowhere."""
    try:
        enter()
    except ValueError as error:
        sys.exit(str(error))


class Star(VirtualHosts):
    """Every host has a cable to one switch.

    Args:
        hosts: How many, ``node0`` and so on.
        rate: Of each cable, in bit/s in each direction.
        switch: Whether there is one more host, ``switch``, the last one,
            that no cable slows down: what runs there is in the switch.
    """

    burst = BURST

    def __init__(self, hosts: int, rate: float, switch: bool = False) -> None:
        super().__init__(hosts, rate, ['switch'] * switch)
        self.kind = f'star of {hosts} hosts' + (
            ' and one in the switch' if switch else '')

    def run(self, command, each=1, env=None, timeout=None):
        """As that of hosts; PyTorch's processes find each other, too."""
        return super().run(command, each, {
            'GLOO_SOCKET_IFNAME': self.interface, 'MASTER_PORT': '29500',
            'MASTER_ADDR': self.addresses(0)[0], **(env or {})}, timeout)

    def describe(self) -> str:
        """What this network is, in a line for the head of a result."""
        control = self.call(self.hosts[0], 'cat', _CONTROL).strip()
        return (f'{self.kind}, every link {self.rate / 1e6:g} Mbit/s in each '
                f'direction (tbf), TCP {control}')

    def payload(self) -> float:
        """Bit/s that a link carries in each direction, less headers."""
        return _PAYLOAD * self.rate


class Torus(Star):
    """A physical X x Y torus: each pair of neighbours has a cable.

    Host ``node{x * Y + y}`` is at (x, y).  Where a dimension has 2 hosts,
    the neighbours on both sides are the same host: there is one cable to it,
    not two, as one address can only be reached by one way.  In a dimension
    of 1 there is none.

    A host's address is on a device of its own without a cable; its routes
    lead to each neighbour's address over the cable to it.  Besides, all
    hosts are at a switch that no cable slows down: for start-up, and for the
    few messages, as of a barrier, between hosts that are not neighbours.
    Hosts forward nothing.

    Args:
        x, y: Hosts per dimension.
        rate: Of each cable, in bit/s in each direction.
    """

    interface = 'own0'

    def __init__(self, x: int, y: int, rate: float) -> None:
        VirtualHosts.__init__(self, 0, rate, [
            f'node{index}' for index in range(x * y)])
        self.kind = f'physical torus of {x} x {y} hosts'
        pairs = {(min(here, other), max(here, other))
                 for here in range(x * y) for other in (
                     (here // y + 1) % x * y + here % y,
                     here // y * y + (here % y + 1) % y) if other != here}
        self.ip(None, [
            f'link add to{second} netns node{first} type veth '
            f'peer name to{first} netns node{second}'
            for first, second in pairs])
        for index in range(x * y):
            self._build_host(index, [sum(pair) - index for pair in pairs
                                     if index in pair])

    def addresses(self, host: int) -> list[str]:
        return [f'10.78.0.{host + 1}', *super().addresses(host)]

    def _build_host(self, index: int, neighbours: list[int]) -> None:
        host, own = self.hosts[index], self.addresses(index)[0]
        # UCX uses a device only if it is connected to something, and has a
        # route to the peer that is as exact as any: hence the second end,
        # and a second route, which no packet follows, as its metric is worse.
        lines = ['link add own0 type veth peer name own0-end',
                 f'addr add {own}/32 dev own0', 'link set own0 up',
                 'link set own0-end up']
        lines += [f'link set to{peer} up' for peer in neighbours]
        for peer in range(len(self.hosts)):
            if peer != index:
                route = f'route add {self.addresses(peer)[0]}/32 src {own} dev'
                device = f'to{peer}' if peer in neighbours else INTERFACE
                lines += [f'{route} {device}', f'{route} own0 metric 1000']
        self.ip(host, lines)
        for peer in neighbours:
            self.shape(host, f'to{peer}')
