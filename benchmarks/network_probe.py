"""One end of a TCP connection over a link: how much payload arrives.

    python network_probe.py listen|connect ADDRESS PORT SECONDS

``benchmarks/network`` starts one at either end of a link; both send and
receive at once.
"""
from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

# In seconds.  A stream settles for several times the queue's longest delay.
# Both ends start their clocks when they connect; each goes on sending this
# long after its own measurement, so that the other's has no quiet end.
_SETTLING, _LONGER, _WAITING = 0.3, 0.1, 30
_CHUNK = 1 << 18    # bytes


def main(how: str, address: str, port: str, seconds: str) -> None:
    """Prints how many payload bits arrived per second."""
    connection = (_listen(address, int(port)) if how == 'listen' else
                  socket.create_connection((address, int(port)), _WAITING))
    connection.settimeout(_WAITING)
    start = time.perf_counter() + _SETTLING
    stop = start + float(seconds)
    threading.Thread(target=_send, args=(connection, stop + _LONGER),
                     daemon=True).start()
    print(receive(connection, start, stop), flush=True)
    os._exit(0)         # what is still unsent does not matter


def _listen(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as server:
        server.settimeout(_WAITING)
        print('listening', flush=True)
        return server.accept()[0]


def _send(connection: socket.socket, until: float) -> None:
    data = bytes(_CHUNK)
    # The other end may have finished a little earlier.
    with contextlib.suppress(ConnectionError):
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
        try:
            got = connection.recv_into(buffer)
        except ConnectionResetError:
            got = 0
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


if __name__ == '__main__':
    main(*sys.argv[1:])
