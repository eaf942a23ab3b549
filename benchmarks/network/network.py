"""What a star and a torus have in common: hosts, links and ``mpiexec``."""
from __future__ import annotations

import abc
import contextlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from . import speed
from .namespaces import Namespaces, NetworkError
from .speed import Link, Speed

START_UP = 'eth0'       # the interface of every host that mpiexec uses
_LATENCY = '100ms'
_MOST_HOSTS = 250
_CONTROL = '/proc/sys/net/ipv4/tcp_congestion_control'
_MASTER_PORT = '29500'


class Network(abc.ABC):
    """Hosts on this machine whose links have a rate.

    Use it in a ``with`` statement.  What it made is gone when that is left,
    and also when this process is killed.

    Attributes:
        hosts: Names of the hosts, which are their host names too.
        links: The shaped links.
        rate: Of every link and direction, in bit/s on the wire, Ethernet's
            headers included.
        interface: The device that a host's own address is on.
        kind: Its form, in words.
        burst: Bytes that a link passes at once after it was idle.
    """

    interface = START_UP
    kind = 'network'
    burst = 128 << 10

    def __init__(self, hosts: Sequence[str], rate: float) -> None:
        if not 2 <= len(hosts) <= _MOST_HOSTS:
            raise ValueError(f'a network has 2 to {_MOST_HOSTS} hosts, not '
                             f'{len(hosts)}')
        if rate <= 0:
            raise ValueError(f'a rate is more than 0 bit/s, not {rate}')
        self.hosts = list(hosts)
        self.rate = float(rate)
        self.links: list[Link] = []
        self.spaces = Namespaces(self.hosts, [
            sorted({self.address(index), self._start_up_address(index)},
                   reverse=True) for index in range(len(hosts))])
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs in the hosts and takes everything away."""
        self.spaces.close()

    def describe(self) -> str:
        """What this network is, in a line for the head of a result."""
        control = self.spaces.call(self.hosts[0], 'cat', _CONTROL).strip()
        return (f'{self.kind}, every link {self.rate / 1e6:g} Mbit/s in each '
                f'direction (tbf), TCP {control}')

    def address(self, host: int) -> str:
        """The IPv4 address of a host, by number; ``MASTER_ADDR`` is 0's."""
        return self._start_up_address(host)

    def counters(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Bytes (sent, received) by each interface of each host so far.

        Without the headers that a large packet of the kernel's gets when it
        is cut (about 4 %), so that payload can be compared with them.
        """
        return {host: _device_counters(self.spaces.read(host, 'net/dev'))
                for host in self.hosts}

    def rates(self, seconds: float = 0.5,
              probe: str | None = None) -> list[Speed]:
        """The real speed of each link, measured.

        Args:
            seconds: How long each of the three measurements takes;
                ``iperf3`` only knows whole ones.
            probe: ``'iperf3'``, or ``'own'``, which needs nothing; None is
                the first of them that is there.
        """
        return speed.measure(self.spaces, self.links, self.rate, seconds,
                             probe)

    def payload(self) -> float:
        """What a link carries in either direction, both busy, in bit/s.

        The median of all links, measured by the own probe: a core that had
        other work for a while makes single links look slow.
        """
        return statistics.median(
            rate for speed in self.rates(1.0, 'own')
            for rate in (speed.out_both, speed.back_both))

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command for ``subprocess`` that runs ``command`` in a host."""
        return self.spaces.inside(self.hosts[host], command)

    def run(self, command: Sequence[str],
            ranks_per_host: int | Sequence[int] = 1,
            env: Mapping[str, str] | None = None,
            timeout: float | None = None,
            capture: bool = False) -> subprocess.CompletedProcess:
        """Runs ``command`` in MPI ranks on all hosts, by ``mpiexec``.

        Ranks of one host share memory; between hosts there is TCP only.
        Rank r is on host ``r // ranks_per_host``.

        Args:
            command: What each rank runs, in this working directory.
            ranks_per_host: How many ranks; or one number per host, which
                may be 0.
            env: Environment variables besides this process's own.
            timeout: Seconds, after which every process in the hosts is
                ended.
            capture: Whether the output is in the result, as text, rather
                than printed; ``stderr`` apart from ``stdout``.

        Returns:
            The exit code of ``mpiexec``, and the output.

        Raises:
            subprocess.TimeoutExpired: As said; with the output so far, as
                text, if it is captured.
        """
        counts = ([ranks_per_host] * len(self.hosts)
                  if isinstance(ranks_per_host, int) else ranks_per_host)
        if len(counts) != len(self.hosts) or min(counts) < 0 or not any(
                counts):
            raise ValueError(f'ranks per host for {len(self.hosts)} hosts, '
                             f'not {ranks_per_host}')
        pipe = subprocess.PIPE if capture else None
        process = subprocess.Popen(
            self.spaces.inside(None, [*self._mpiexec(counts), *command]),
            env={**os.environ, **self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True)
        with process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as error:
                self._end(process)
                output, errors = process.communicate()
                raise subprocess.TimeoutExpired(
                    error.cmd, error.timeout, output, errors) from None
            except BaseException:
                self._end(process)
                raise
        return subprocess.CompletedProcess(list(command), process.returncode,
                                           output, errors)

    def environment(self) -> dict[str, str]:
        """The environment variables that keep ranks on these links."""
        return {'UCX_TLS': 'tcp,self', 'UCX_NET_DEVICES': self.interface,
                'GLOO_SOCKET_IFNAME': self.interface,
                'MASTER_ADDR': self.address(0), 'MASTER_PORT': _MASTER_PORT}

    def _mpiexec(self, counts: Sequence[int]) -> list[str]:
        hosts = [f'{self._start_up_address(index)}:{count}'
                 for index, count in enumerate(counts) if count]
        return [*mpiexec(), '-launcher', 'ssh', '-launcher-exec',
                self.spaces.ENTER, '-iface', START_UP,
                '-hosts', ','.join(hosts), '-n', str(sum(counts))]

    def _end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.spaces.end_processes()

    @abc.abstractmethod
    def _build(self) -> None:
        """Makes the devices and fills ``links``."""

    # What the builders are put together from.

    @staticmethod
    def _start_up_address(index: int) -> str:
        return f'10.77.0.{index + 1}'

    _FABRIC_ADDRESS = '10.77.0.254'

    def _build_bridge(self) -> None:
        """A bridge in the fabric that every host has its ``eth0`` on."""
        lines = [f'link add {START_UP} type bridge stp_state 0 '
                 'forward_delay 0 mcast_snooping 0',
                 f'addr add {self._FABRIC_ADDRESS}/24 dev {START_UP}',
                 f'link set {START_UP} up']
        for index, number in enumerate(self.spaces.numbers):
            lines += [f'link add port{index} type veth peer name {START_UP} '
                      f'netns {number}',
                      f'link set port{index} master {START_UP}',
                      f'link set port{index} up']
        self._ip(None, lines)
        for index, host in enumerate(self.hosts):
            address = self._start_up_address(index)
            self._ip(host, [f'addr add {address}/24 dev {START_UP}',
                            f'link set {START_UP} up'])

    def _ip(self, host: str | None, lines: Sequence[str]) -> None:
        self.spaces.call(host, 'ip', '-batch', '-', lines='\n'.join(lines))

    def _shape(self, host: str | None, devices: Sequence[str]) -> None:
        """Gives what these devices send the links' rate."""
        self.spaces.call(host, 'tc', '-batch', '-', lines='\n'.join(
            f'qdisc add dev {device} root tbf rate {self.rate:.0f}bit '
            f'burst {self.burst} latency {_LATENCY}' for device in devices))


def mpiexec() -> list[str]:
    """``$MPIEXEC``, or the one beside the interpreter, or on the path."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = (beside if os.path.exists(beside) else shutil.which('mpiexec'))
    command = shlex.split(os.environ.get('MPIEXEC', '')) or (
        [found] if found else [])
    if not command:
        raise NetworkError('no mpiexec beside the interpreter, on the path '
                           'or in MPIEXEC')
    return command


def _device_counters(text: str) -> dict[str, tuple[int, int]]:
    """Of /proc/net/dev: a name, 8 numbers of receiving, 8 of sending."""
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(':')
        numbers = [int(number) for number in rest.split()]
        counters[name.strip()] = (numbers[8], numbers[0])
    return counters
