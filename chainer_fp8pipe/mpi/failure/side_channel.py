"""Short messages between ranks that do not use MPI, which may be stuck.

They are UDP datagrams: without connections, a host that is gone is silent and
nothing else, and nothing is left behind.  One may be lost; what matters is
sent again.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:         # not on every system
    fcntl = None            # type: ignore[assignment]

_SIOCGIFADDR = 0x8915       # <linux/sockios.h>
_LARGEST = 60_000           # bytes of a datagram


class Address(NamedTuple):
    """Where a socket is reached.

    Attributes:
        hosts: Of all networks that its host is in; the first is for those on
            the same host.
        port: Of all of them.
        token: Must begin each message to it, or the message is ignored.
        host: A name for people.
        machine: Equal for those on the same host.
    """

    hosts: tuple[str, ...]
    port: int
    token: str
    host: str
    machine: str


class SideChannel:
    """This process's socket, and the addresses of others.

    Attributes:
        address: Of this socket.
    """

    def __init__(self) -> None:
        self._socket = open_socket()
        self.address = address_of(self._socket, secrets.token_hex(8))
        self._known: dict[int, Address] = {}
        # The one that answered last; others may not lead there.
        self._heard: dict[int, tuple[str, int]] = {}

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def know(self, others: Mapping[int, Address]) -> None:
        """Learns addresses, by numbers of the caller's."""
        self._known.update(others)

    def send(self, number: int, message: Mapping[str, Any]) -> None:
        """Sends a message; does not wait, and does not say whether it left."""
        address = self._known[number]
        data = f'{address.token}{json.dumps(message)}'.encode()[:_LARGEST]
        if number in self._heard:
            places = [self._heard[number]]
        elif address.machine == self.address.machine:
            places = [(address.hosts[0], address.port)]
        else:
            places = [(host, address.port) for host in address.hosts[1:]]
        for place in places:
            with contextlib.suppress(OSError):      # there is no way there
                self._socket.sendto(data, place)

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come since the last call.

        A message with ``from`` must be of who has that number.
        """
        found: list[dict[str, Any]] = []
        token = self.address.token.encode()
        while True:
            try:
                data, place = self._socket.recvfrom(1 << 16)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError:     # an earlier one of ours was refused
                continue
            if not data.startswith(token):
                continue        # of another program
            with contextlib.suppress(ValueError):
                message = json.loads(data[len(token):])
                if isinstance(message, dict):
                    found.append(message)
                    if message.get('from') in self._known:
                        self._heard[message['from']] = place

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def open_socket() -> socket.socket:
    """A socket that is reached from all networks, at a port of its own."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.bind(('', 0))
    return made


def address_of(made: socket.socket, token: str) -> Address:
    """How others reach a socket of this host."""
    return Address(('127.0.0.1', *_own_hosts()), made.getsockname()[1], token,
                   os.uname().nodename, _machine())


def _machine() -> str:
    """Differs between hosts, and between networks of one host."""
    parts = [os.uname().nodename]
    for path in ('/proc/sys/kernel/random/boot_id', '/proc/self/ns/net'):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if os.path.islink(path)
                         else pathlib.Path(path).read_text().strip())
    return ' '.join(parts)


def _own_hosts() -> list[str]:
    """This host's addresses in its networks, less that of itself."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError, AttributeError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     name.encode()[:15].ljust(40, b'\0'))
                found.append(socket.inet_ntoa(answer[20:24]))
    if not found:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(socket.gethostname()))
    return [host for host in dict.fromkeys(found)
            if not host.startswith('127.')]
