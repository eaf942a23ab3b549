"""A connection between two watchdogs."""
from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import time
from typing import Any

from .stall_cause import RankView

_SIOCGIFADDR = 0x8915           # <linux/sockios.h>
_MOST_WAITING = 1 << 22         # bytes that a connection may be behind


class WatchdogLink:
    """A connection to another watchdog, on which lines of JSON travel.

    Attributes:
        views: Of the ranks there, as it has said last.
        usual: Seconds of an update there.
        can_end: A rank there can end the job.
        heard: When.
    """

    def __init__(self, connection: socket.socket, is_known: bool) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.is_closed = False
        self.is_known = is_known        # it has shown its token
        self.views: list[RankView] = []
        self.usual, self.can_end = 0.0, False
        self.heard = time.monotonic()
        self._read = self._unsent = b''

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; does not wait, and drops it if there are many."""
        if len(self._unsent) < _MOST_WAITING:
            self._unsent += json.dumps(message).encode() + b'\n'
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(
                self._unsent, socket.MSG_NOSIGNAL):]

    def receive(self, token: str) -> list[dict[str, Any]]:
        """Messages that have come, of one who knows the token."""
        try:
            while data := self.connection.recv(1 << 16):
                self._read += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._read = self._read.split(b'\n')
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if not isinstance(message, dict):
                    continue
                self.is_known |= message.get('token') == token
                if self.is_known:
                    self.heard = time.monotonic()
                    found.append(message)
        if not self.is_known and (lines or len(self._read) > 1000):
            self.is_closed = True       # another program
        return found


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses by which other hosts may reach this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     name.encode()[:15].ljust(40, b'\0'))
                found.append(socket.inet_ntoa(answer[20:24]))
    if not found:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(socket.gethostname()))
    return tuple(host for host in dict.fromkeys(found)
                 if not host.startswith('127.'))
