"""One end of a TCP connection that measures a link; run by ``speed``.

    probe.py listen ADDRESS PORT SIDE SECONDS
    probe.py connect ADDRESS PORT SIDE SECONDS

SIDE is ``send``, ``receive`` or ``both``.  Who listens prints ``listening``
before anything else.  Who receives prints how many
payload bits arrived per second, once the stream had time to settle; who only
sends prints 0.
"""
from __future__ import annotations

import os
import socket
import sys
import threading
import time

_SETTLING = 0.3     # seconds: several times the queue's longest delay
# Both ends start their clocks when they connect; each goes on this long
# after its own measurement, so that the other's has no quiet end.
_LONGER = 0.1       # seconds
_CHUNK = 1 << 18    # bytes
_WAITING = 30       # seconds, for the other end


def main(how: str, address: str, port: str, side: str,
         seconds: str) -> None:
    connection = (_listen(address, int(port)) if how == 'listen' else
                  socket.create_connection((address, int(port)), _WAITING))
    connection.settimeout(_WAITING)
    start = time.perf_counter() + _SETTLING
    stop = start + float(seconds)
    sending = threading.Thread(
        target=_send, args=(connection, stop + _LONGER), daemon=True)
    if side != 'receive':
        sending.start()
    if side == 'send':
        sending.join()
        print(0)
    else:
        print(_receive(connection, start, stop))
    sys.stdout.flush()
    os._exit(0)         # what is still unsent does not matter


def _listen(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as server:
        server.settimeout(_WAITING)
        print('listening', flush=True)
        return server.accept()[0]


def _send(connection: socket.socket, until: float) -> None:
    data = bytes(_CHUNK)
    try:
        while time.perf_counter() < until:
            connection.sendall(data)
    except ConnectionError:     # the other end has finished a little earlier
        pass


def _receive(connection: socket.socket, start: float, stop: float) -> float:
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
