"""How fast links really are: measured by iperf3, or by a probe of our own."""
from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from .namespaces import Namespaces, NetworkError

_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'probe.py')
_PORT = 5201        # the first link's
_WAYS = ('out', 'back', 'both')
# Links are measured side by side while they need no more than this in all:
# so much a machine's kernel carries without being what is measured.
_AT_ONCE = 2e9      # bit/s


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a link.

    Attributes:
        host: The host's name; None is a bridge.
        address: Where its sockets for this link listen.
    """

    host: str | None
    address: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A link that has a rate.

    Attributes:
        name: For tables.
        first, second: Its ends.
    """

    name: str
    first: End
    second: End


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a TCP stream gets through a link, in bit/s of payload.

    Attributes:
        link: Its name.
        out, back: From the first end to the second, and from the second to
            the first, while nothing goes the other way.
        out_both, back_both: The same, both at the same time.
        probe: What measured it, ``'iperf3'`` or ``'own'``.
    """

    link: str
    out: float
    back: float
    out_both: float
    back_both: float
    probe: str


def measure(spaces: Namespaces, links: Sequence[Link], rate: float,
            seconds: float, probe: str | None) -> list[Speed]:
    """The speed of each link; see ``Network.rates``."""
    probe = probe or ('iperf3' if shutil.which('iperf3') else 'own')
    way = {'iperf3': _iperf3, 'own': _own}[probe]

    def of(link: Link) -> Speed:
        # A bridge, or a host, may be at the end of several links.
        port = str(_PORT + links.index(link))
        out, back, both = (way(spaces, link, which, seconds, port)
                           for which in _WAYS)
        return Speed(link.name, out[0], back[1], *both, probe)

    together = max(1, int(_AT_ONCE / (2 * rate)))
    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        return list(pool.map(of, links))


def table(speeds: Sequence[Speed]) -> str:
    """The speeds as text, in Mbit/s."""
    width = max(len(speed.link) for speed in speeds)
    lines = [f'{"link":{width}}     out    back    both at once   '
             f'(Mbit/s of payload, by {_name(speeds[0].probe)})']
    lines += [f'{speed.link:{width}} {speed.out / 1e6:7.1f} '
              f'{speed.back / 1e6:7.1f} {speed.out_both / 1e6:7.1f} '
              f'{speed.back_both / 1e6:7.1f}' for speed in speeds]
    return '\n'.join(lines)


def _name(probe: str) -> str:
    return 'its own probe' if probe == 'own' else probe


def _own(spaces: Namespaces, link: Link, way: str, seconds: float,
         port: str) -> tuple[float, float]:
    """Payload in bit/s (from first to second, from second to first)."""
    # The first end connects.
    sides = {'out': ('send', 'receive'), 'back': ('receive', 'send'),
             'both': ('both', 'both')}[way]
    python = [sys.executable, '-I', _PROBE]
    with _Tool(spaces, link.second, [
            *python, 'listen', link.second.address, port, sides[1],
            str(seconds)]) as second:
        second.line()
        with _Tool(spaces, link.first, [
                *python, 'connect', link.second.address, port, sides[0],
                str(seconds)]) as first:
            return float(second.rest()), float(first.rest())


def _iperf3(spaces: Namespaces, link: Link, way: str, seconds: float,
            port: str) -> tuple[float, float]:
    """As :func:`_own`."""
    options = {'out': [], 'back': ['--reverse'], 'both': ['--bidir']}[way]
    with _Tool(spaces, link.second, [
            'iperf3', '--server', '--port', port, '--one-off',
            '--forceflush', '--bind', link.second.address]) as second:
        while 'listening' not in second.line():
            pass
        with _Tool(spaces, link.first, [
                'iperf3', '--client', link.second.address, '--port', port,
                '--bind', link.first.address, '--omit', '1', '--time',
                str(math.ceil(seconds)), '--json', *options]) as first:
            end = json.loads(first.rest())['end']
        second.rest()
    got = end['sum_received']['bits_per_second']
    if way == 'both':
        return got, end['sum_received_bidir_reverse']['bits_per_second']
    return (got, 0.) if way == 'out' else (0., got)


class _Tool:
    """A process at one end of a link, ended at the latest at the exit."""

    def __init__(self, spaces: Namespaces, end: End,
                 command: Sequence[str]) -> None:
        self._name = ' '.join(command[:3])
        self._process = subprocess.Popen(
            spaces.inside(end.host, command), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True)

    def __enter__(self) -> _Tool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.communicate()

    def line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return line.strip() if line else self._fail()

    def rest(self) -> str:
        output, errors = self._process.communicate(timeout=60)
        return self._fail(output + errors) if self._process.returncode else (
            output)

    def _fail(self, said: str = '') -> str:
        assert self._process.stderr
        said = said or self._process.stderr.read()
        raise NetworkError(f'{self._name} fails: ' + ' '.join(said.split()))
