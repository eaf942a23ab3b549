"""Networks of virtual hosts: what their links carry, and a torus.

Benchmarks call :func:`begin` first: the rest runs in namespaces of its own,
see chainer_fp8pipe/launcher/virtual_hosts.py.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

from chainer_fp8pipe.launcher.virtual_hosts import (
    BURST,
    INTERFACE,
    VirtualHosts,
    enter,
)

_CONTROL = '/proc/sys/net/ipv4/tcp_congestion_control'
_AT_ONCE = 2e9      # bit/s of all links that are measured at once
_PORT = 5201        # the first link's
# In seconds.  A stream settles for several times the queue's longest delay.
# Both ends start their clocks when they connect; each goes on sending this
# long after its own measurement, so that the other's has no quiet end.
_SETTLING, _LONGER, _WAITING = 0.3, 0.1, 30
_CHUNK = 1 << 18    # bytes
_LIBC = ctypes.CDLL(None, use_errno=True)


def begin() -> None:
    """Goes on where there can be virtual hosts; ends in a line if nowhere."""
    try:
        enter()
    except ValueError as error:
        sys.exit(str(error))


class Link(NamedTuple):
    """A link that has a rate.

    Attributes:
        first, second: The hosts at its ends; None is the switch.
        address: Where the second end's sockets listen.
    """

    first: str
    second: str | None
    address: str


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
        self.links = [Link(host, None, '10.77.0.254')
                      for host in self.hosts[:hosts]]

    def describe(self) -> str:
        """What this network is, in a line for the head of a result."""
        control = self.call(self.hosts[0], 'cat', _CONTROL).strip()
        return (f'{self.kind}, every link {self.rate / 1e6:g} Mbit/s in each '
                f'direction (tbf), TCP {control}')

    def rates(self, seconds: float = 1.0) -> list[float]:
        """Payload in bit/s that each link carries, both directions at once.

        Links are measured side by side while that is no more than a kernel
        carries without being what is measured.
        """
        together = max(1, int(_AT_ONCE / (2 * self.rate)))
        with concurrent.futures.ThreadPoolExecutor(together) as pool:
            return [rate for rates in pool.map(
                lambda number: _both_ways(self.links[number], _PORT + number,
                                          seconds), range(len(self.links)))
                    for rate in rates]

    def payload(self) -> float:
        """The median: a core that had other work makes links look slow."""
        return statistics.median(self.rates())


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
        self.links = [
            Link(self.hosts[first], self.hosts[second],
                 self.addresses(second)[0]) for first, second in sorted(pairs)]
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


# --- what a link carries -----------------------------------------------------

@contextlib.contextmanager
def in_network(host: str | None) -> Iterator[None]:
    """Sockets of this thread are made in a host; None: in the switch."""
    def go_to(place: IO) -> None:
        if _LIBC.setns(place.fileno(), 0):
            raise OSError(ctypes.get_errno(), f'setns to {place.name}')
    with open('/proc/thread-self/ns/net') as here, open(
            f'/run/netns/{host}' if host else here.name) as there:
        go_to(there)
        try:
            yield
        finally:
            go_to(here)


def _both_ways(link: Link, port: int, seconds: float) -> list[float]:
    """Payload in bit/s there and back."""
    where = link.address, port
    with contextlib.ExitStack() as stack:
        with in_network(link.second):
            server = stack.enter_context(socket.create_server(where))
        with in_network(link.first):
            ends = [socket.create_connection(where, _WAITING)]
        ends.append(server.accept()[0])
        start = time.perf_counter() + _SETTLING
        stop = start + seconds
        for end in ends:
            stack.enter_context(end).settimeout(_WAITING)
            threading.Thread(target=_send, args=(end, stop + _LONGER),
                             daemon=True).start()
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
        return list(pool.map(lambda end: receive(end, start, stop), ends))


def _send(connection: socket.socket, until: float) -> None:
    data = bytes(_CHUNK)
    # The other end may have finished a little earlier.
    with contextlib.suppress(OSError):
        while time.perf_counter() < until:
            connection.sendall(data)


def receive(connection: socket.socket, start: float, stop: float) -> float:
    """Bits per second from the first arrival after ``start`` on.

    It goes on reading a little longer, or both ends' senders could wait for
    each other.  0: this end had no core meanwhile, or too late.
    """
    buffer = bytearray(_CHUNK)
    first = last = now = 0.
    count = 0
    while now < stop + _LONGER:
        got = connection.recv_into(buffer)
        now = time.perf_counter()
        if not got:
            if now < stop:
                raise ConnectionError('the other end has gone away')
            break
        if not first:
            first = now if now >= start else 0.
        elif now < stop:
            count, last = count + got, now
    return 8 * count / (last - first) if count else 0.
