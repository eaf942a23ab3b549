"""A network of virtual hosts, and what its links carry.

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
from typing import IO

from chainer_fp8pipe.launcher.virtual_hosts import (
    BURST,
    HostsError,
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
    except HostsError as error:
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
        self.linked = self.hosts[:hosts]

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
                lambda number: _both_ways(self.linked[number], _PORT + number,
                                          seconds), range(len(self.linked)))
                    for rate in rates]

    def payload(self) -> float:
        """The median: a core that had other work makes links look slow."""
        return statistics.median(self.rates())


# --- what a link carries -----------------------------------------------------

@contextlib.contextmanager
def in_network(host: str) -> Iterator[None]:
    """Sockets of this thread are made in a host."""
    def go_to(place: IO) -> None:
        if _LIBC.setns(place.fileno(), 0):
            raise OSError(ctypes.get_errno(), f'setns to {place.name}')
    with open('/proc/thread-self/ns/net') as here, open(
            f'/run/netns/{host}') as there:
        go_to(there)
        try:
            yield
        finally:
            go_to(here)


def _both_ways(host: str, port: int, seconds: float) -> list[float]:
    """Payload in bit/s between a host and the switch, there and back."""
    where = '10.77.0.254', port
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(where))
        with in_network(host):
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
