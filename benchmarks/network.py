"""Hosts on this machine whose links have a rate; and what links carry.

    with Star(4, 500e6) as network:
        print(network.describe())
        network.run(['python', 'benchmark.py'], ranks_per_host=2)

Needs root and iproute2; :func:`missing` says what is.  From the command
line: ``python -m benchmarks.network --help``.
"""
# Every host is a process that waits for the end of its standard input, in a
# network, host name, IPC, process id and mount namespace of its own.  All
# hosts lie in a further group of namespaces, the *fabric*, which holds the
# bridges and runs ``mpiexec``.  Nothing has a name outside of it, so any
# number of networks can exist at once.
#
# The maker holds the other end of the fabric's standard input.  When it ends,
# in whatever way, ``SIGKILL`` included, the fabric's first process reads the
# end of the file and ends, and with it the kernel ends every process in the
# hosts and takes the namespaces, devices, queues and mounts away.
from __future__ import annotations

import abc
import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOOLS = {'ip': 'iproute2', 'tc': 'iproute2', 'nsenter': 'util-linux',
         'unshare': 'util-linux', 'mount': 'mount'}
_SPACES = ['--net', '--uts', '--ipc', '--mount', '--pid']

# /proc/self/stat is read before the new /proc is there: it has this process's
# number as the namespace outside knows it.  /sys must show the new network's
# devices.  A private /dev/shm keeps hosts from sharing memory.  The fabric's
# /etc/hosts, with the hosts' names, is in their file systems too.  Reno is the
# one congestion control that every kernel lets every namespace have.  BBR, the
# default of some, all but stops each connection for 200 ms every 10 s.  An
# acknowledgement that is late was waiting for a core here: a probe for a lost
# tail would be taken for a loss, and narrow the connection.
_FIRST_PROCESS = '''
set -e
read -r number rest < /proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
echo "$1" > /proc/sys/kernel/hostname
if [ -n "$2" ] && [ -e /etc/hosts ]; then
    echo "$2" > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
fi
set_to() {
    if [ -e "/proc/sys/net/$1" ]; then echo "$2" > "/proc/sys/net/$1"; fi
}
set_to ipv4/ip_forward 0
set_to ipv4/tcp_no_metrics_save 1
set_to ipv4/tcp_congestion_control reno
set_to ipv4/tcp_early_retrans 0
set_to ipv6/conf/all/disable_ipv6 1
set_to ipv6/conf/default/disable_ipv6 1
ip link set lo up
echo "$number"
exec cat
'''

# What mpiexec calls in place of ssh: [options] HOST COMMAND...
_ENTER = '''#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
*) echo "no such host: $1" >&2; exit 1 ;;
esac
shift
exec nsenter --target $number {spaces} -- sh -c "$*"
'''


class NetworkError(RuntimeError):
    """The virtual network cannot be made here; the message says why."""


def missing() -> str | None:
    """Why no virtual network can be made here, in a line; None if it can.

    Whether the kernel allows namespaces and queues is only known once they
    are made; then :class:`NetworkError` says so.
    """
    if os.geteuid() != 0:
        return 'a virtual network needs root (network namespaces)'
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            return f'a virtual network needs {tool} ({package})'
    return None


class Namespaces:
    """The fabric and its hosts.

    Args:
        hosts: Their names, which become their host names too.
        addresses: Per host, those that it will have; its own one first.

    Raises:
        NetworkError: They cannot be made.
    """

    ENTER = '/dev/shm/enter'

    def __init__(self, hosts: Sequence[str],
                 addresses: Sequence[Sequence[str]]) -> None:
        reason = missing()
        if reason:
            raise NetworkError(reason)
        self.hosts = list(hosts)
        self._processes: list[subprocess.Popen] = []
        try:
            self._fabric = _number(self._start(
                [], 'fabric', _host_file(self.hosts, addresses)))
            started = [self._start(self._entering(), host)
                       for host in self.hosts]
            #: Each host's process, as seen in the fabric.
            self.numbers = [_number(process) for process in started]
            self._write_enter(addresses)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes in the hosts and takes everything away."""
        # The fabric's first process ends, and the kernel ends the others.
        for process in self._processes:
            assert process.stdin
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()      # unshare --kill-child does the rest
            with process:
                pass                # closes its standard output
        self._processes.clear()

    def inside(self, host: str | None, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` in a host; None: the fabric.

        It keeps the working directory and the environment.
        """
        command = ['sh', '-c', 'cd "$0" && exec "$@"', os.getcwd(), *command]
        if host is not None:
            command = [self.ENTER, host, shlex.join(command)]
        return [*self._entering(), *command]

    def call(self, host: str | None, *command: str, lines: str = '') -> str:
        """Runs a tool in a host and returns what it prints.

        Raises:
            NetworkError: It fails; with what it says.
        """
        done = subprocess.run(self.inside(host, command), input=lines,
                              capture_output=True, text=True)
        if done.returncode:
            raise NetworkError(
                f'{" ".join(command)} fails here: '
                + ' '.join((done.stderr or done.stdout).split()))
        return done.stdout

    def end_processes(self, host: str) -> None:
        """Ends every process in a host, other than its first."""
        # The shell that does it is one of them.
        subprocess.run(self.inside(host, ['sh', '-c', 'kill -KILL -1']),
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def read(self, host: str, path: str) -> str:
        """A file of /proc/PID of a host's first process."""
        number = self.numbers[self.hosts.index(host)]
        return (self._root / 'proc' / str(number) / path).read_text()

    def identities(self) -> list[str]:
        """The network namespaces as /proc/PID/ns/net names them."""
        processes = [pathlib.Path(f'/proc/{self._fabric}'), *(
            self._root / 'proc' / str(number) for number in self.numbers)]
        return [os.readlink(path / 'ns' / 'net') for path in processes]

    @property
    def _root(self) -> pathlib.Path:
        """The fabric's file system."""
        return pathlib.Path(f'/proc/{self._fabric}/root')

    def _entering(self) -> list[str]:
        return ['nsenter', '--target', str(self._fabric), *_SPACES, '--']

    def _start(self, entering: list[str], name: str,
               host_file: str = '') -> subprocess.Popen:
        # A session of its own: Ctrl-C must not end it before the ranks.
        process = subprocess.Popen(
            [*entering, 'unshare', *_SPACES, '--fork', '--kill-child', '--',
             'sh', '-c', _FIRST_PROCESS, 'sh', name, host_file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd='/',
            start_new_session=True)
        self._processes.append(process)
        return process

    def _write_enter(self, addresses: Sequence[Sequence[str]]) -> None:
        cases = [f'{"|".join([host, *known])}) number={number} ;;'
                 for host, known, number
                 in zip(self.hosts, addresses, self.numbers, strict=True)]
        path = self._root / self.ENTER[1:]
        path.write_text(_ENTER.format(cases='\n'.join(cases),
                                      spaces=' '.join(_SPACES)))
        path.chmod(0o755)


def _host_file(hosts: Sequence[str],
               addresses: Sequence[Sequence[str]]) -> str:
    """The text of /etc/hosts; an address's IPv6 form is asked for too."""
    return '\n'.join(['127.0.0.1 localhost', *(
        f'{form}{address} {host}'
        for host, known in zip(hosts, addresses, strict=True)
        for address in known for form in ('', '::ffff:'))])


def _number(process: subprocess.Popen) -> int:
    assert process.stdout
    line = process.stdout.readline().strip()
    if line.isdigit():
        return int(line)
    rest = process.stdout.read()
    raise NetworkError('namespaces cannot be made here: '
                       + ' '.join(f'{line} {rest}'.split()))


START_UP = 'eth0'       # the interface of every host that mpiexec uses
_LATENCY = '100ms'
_MOST_HOSTS = 250
_CONTROL = '/proc/sys/net/ipv4/tcp_congestion_control'
_MASTER_PORT = '29500'
_AT_ONCE = 2e9      # bit/s of all links that are measured at once
_PORT = 5201        # the first link's
_PROBE = pathlib.Path(__file__).with_name('network_probe.py').resolve()


class Link(NamedTuple):
    """A link that has a rate.

    Attributes:
        name: For tables.
        first, second: The hosts at its ends; None is the bridge.
        address: Where the second end's sockets listen.
    """

    name: str
    first: str
    second: str | None
    address: str


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

    def rates(self, seconds: float = 1.0) -> dict[str, tuple[float, float]]:
        """Payload in bit/s that each link carries, there and back at once.

        Links are measured side by side while that is no more than a kernel
        carries without being what is measured.
        """
        together = max(1, int(_AT_ONCE / (2 * self.rate)))
        with concurrent.futures.ThreadPoolExecutor(together) as pool:
            found = pool.map(lambda number: self._both_ways(number, seconds),
                             range(len(self.links)))
            return {link.name: rates for link, rates
                    in zip(self.links, found, strict=True)}

    def payload(self) -> float:
        """What a link carries in either direction, both busy, in bit/s.

        The median of all links: a core that had other work for a while makes
        single links look slow.
        """
        return statistics.median(
            rate for rates in self.rates().values() for rate in rates)

    def _both_ways(self, number: int, seconds: float) -> tuple[float, float]:
        link = self.links[number]
        # A bridge, or a host, may be at the end of several links.
        where = [link.address, str(_PORT + number), str(seconds)]
        with contextlib.ExitStack() as stack:
            def probe(how: str, host: str | None) -> subprocess.Popen:
                process = subprocess.Popen(
                    self.spaces.inside(host, [
                        sys.executable, '-I', str(_PROBE), how, *where]),
                    stdout=subprocess.PIPE, text=True,
                    stdin=subprocess.DEVNULL, start_new_session=True)
                stack.enter_context(process)
                stack.callback(process.kill)
                return process
            listening = probe('listen', link.second)
            assert listening.stdout
            listening.stdout.readline()
            ends = listening, probe('connect', link.first)
            there, back = (float(end.communicate(timeout=60)[0] or 'nan')
                           for end in ends)
            if there != there or back != back:
                raise NetworkError(f'the link of {link.name} cannot be '
                                   'measured')
            return there, back

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
        return [*_mpiexec(), '-launcher', 'ssh', '-launcher-exec',
                self.spaces.ENTER, '-iface', START_UP,
                '-hosts', ','.join(hosts), '-n', str(sum(counts))]

    def _end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for host in self.hosts:
            self.spaces.end_processes(host)

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


def _mpiexec() -> list[str]:
    """``$MPIEXEC``, or the one beside the interpreter, or on the path."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = beside if os.path.exists(beside) else shutil.which('mpiexec')
    if not found and not os.environ.get('MPIEXEC'):
        raise NetworkError('no mpiexec beside the interpreter, on the path '
                           'or in MPIEXEC')
    return shlex.split(os.environ.get('MPIEXEC', '')) or [str(found)]


def _device_counters(text: str) -> dict[str, tuple[int, int]]:
    """Of /proc/net/dev: a name, 8 numbers of receiving, 8 of sending."""
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(':')
        numbers = [int(number) for number in rest.split()]
        counters[name.strip()] = (numbers[8], numbers[0])
    return counters


class Star(Network):
    """Every host has a cable to one switch.

    Args:
        hosts: How many, ``node0`` and so on.
        rate: Of each cable, in bit/s in each direction.
        switch: Whether there is one more host, ``switch``, the last one,
            that no cable slows down: what runs there is in the switch.
    """

    def __init__(self, hosts: int, rate: float, switch: bool = False) -> None:
        self._cables = hosts
        self.kind = f'star of {hosts} hosts' + (
            ' and one in the switch' if switch else '')
        super().__init__([*(f'node{index}' for index in range(hosts)),
                          *(['switch'] if switch else [])], rate)

    def _build(self) -> None:
        self._build_bridge()
        for host in self.hosts[:self._cables]:
            self._shape(host, [START_UP])
        self._shape(None, [f'port{index}' for index in range(self._cables)])
        self.links = [Link(host, host, None, self._FABRIC_ADDRESS)
                      for host in self.hosts[:self._cables]]


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
                 self.hosts[first], self.hosts[second], self.address(second))
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


# --- the command line ----------------------------------------------------

_UNITS = {'': 1., 'bit': 1., 'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}
_DESCRIPTION = '''
Builds several hosts on this machine, joined by links that have a rate,
measures the links, and runs COMMAND on the hosts by mpiexec.  Ranks of one
host share memory, and between hosts there is TCP over these links only.
Without COMMAND it only measures.  Needs root and iproute2.
'''
_EXAMPLES = '''
examples:
  python -m benchmarks.network star --hosts 4 --rate 500mbit
  python -m benchmarks.network star --hosts 4 --rate 500mbit \\
      --ranks-per-host 2 -- python train.py
  python -m benchmarks.network torus --shape 3x3 --rate 200mbit -- hostname

Everything is taken away at the end, however this program ends.  The exit
code is that of mpiexec; 1 if the network cannot be built, 124 after a
time-out.
'''


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if '--' in given:
        at = given.index('--')
        given, command = given[:at], given[at + 1:]
    options = _parser().parse_args(given)
    try:
        with _build(options) as network:
            print(network.describe(), flush=True)
            print('Mbit/s of payload, both ways at once:', flush=True)
            for name, rates in network.rates().items():
                print(f'{name:>14}', *(f'{rate / 1e6:8.1f}'
                                       for rate in rates), flush=True)
            if not command:
                return 0
            return network.run(command, options.ranks_per_host,
                               timeout=options.timeout).returncode
    except (NetworkError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired:
        print(f'still running after {options.timeout:g} s: ended',
              file=sys.stderr)
        return 124


def _build(options: argparse.Namespace) -> Network:
    if options.kind == 'star':
        return Star(options.hosts, options.rate, options.switch)
    x, y = options.shape
    return Torus(x, y, options.rate)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.network', description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest='kind', required=True)
    star = kinds.add_parser('star', help='all hosts around one switch')
    star.add_argument('--hosts', type=int, default=4, help='default 4')
    star.add_argument('--switch', action='store_true',
                      help='one more host, the last one, that no link slows '
                      'down: in the switch')
    torus = kinds.add_parser('torus', help='a grid that goes round, with a '
                             'link for each pair of neighbours')
    torus.add_argument('--shape', type=_shape, default=(3, 3), metavar='XxY',
                       help='default 3x3')
    for kind, rate in ((star, '500mbit'), (torus, '200mbit')):
        kind.add_argument('--rate', type=_rate, default=rate, help=(
            'of each link and direction, in bit, kbit, mbit or gbit per '
            f'second, headers included; default {rate}'))
        kind.add_argument('--ranks-per-host', type=int, default=1,
                          metavar='N', help='default 1')
        kind.add_argument('--timeout', type=float, metavar='SECONDS',
                          help='end COMMAND after so long')
        kind.usage = f'{kind.prog} [options] [-- COMMAND ...]'
    return parser


def _rate(text: str) -> float:
    found = re.fullmatch(r'(\d+\.?\d*)([a-z]*)', text.lower())
    if not found or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f'{text} is not a rate such as 500mbit')
    return float(found[1]) * _UNITS[found[2]]


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r'(\d+)x(\d+)', text)
    if not found:
        raise argparse.ArgumentTypeError(f'{text} is not a shape such as 3x3')
    return int(found[1]), int(found[2])


if __name__ == '__main__':
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
