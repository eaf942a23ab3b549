"""Hosts on this machine whose cables have a rate; nobody need be root.

    python -m chainer_fp8pipe.launcher.virtual_hosts \\
        --hosts 4 --rate 100mbit -- python train.py

runs a command in a rank on each of 4 hosts.  A host is a network namespace
with a cable to a switch; MPI goes over TCP.  Linux, iproute2 and MPICH are
needed.
"""
# A process goes into namespaces of its own, and there does as root would.  The
# kernel takes all of it away, also processes, when the first one in them ends:
# a shell, which is killed when the process outside ends, in whatever way.
from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..command_line import Parser, as_type, count
from ..report.quantities import parse_rate
from .hosts import find_starter

_INSIDE = 'CHAINER_FP8PIPE_VIRTUAL_HOSTS'
_FIRST = '''
mount -t proc proc /proc && mount -t sysfs sysfs /sys &&
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm &&
ip link set lo up || exit 125
"$@"
exit $?
'''
#: The interface of every host; mpiexec's is the switch.
INTERFACE = 'eth0'
# Bytes that a link passes at once after it was idle, and its longest queue.
BURST, _LATENCY = 128 << 10, '100ms'

# Every kernel has Reno; BBR stops each connection for 200 ms every 10 s.  An
# acknowledgement that is late was waiting for a core here: a probe for a lost
# tail would be taken for a loss, and narrow the connection.
_SETTINGS = '''
set_to() { [ ! -e /proc/sys/net/$1 ] || echo $2 > /proc/sys/net/$1; }
set_to ipv4/ip_forward 0
set_to ipv4/tcp_no_metrics_save 1
set_to ipv4/tcp_congestion_control reno
set_to ipv4/tcp_early_retrans 0
set_to ipv6/conf/all/disable_ipv6 1
set_to ipv6/conf/default/disable_ipv6 1
'''

# What mpiexec calls in place of ssh: [options] HOST COMMAND...  A private
# /dev/shm keeps hosts from sharing memory, and a /proc of its own keeps a host
# from opening that of processes on others.
_ENTER = '''#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
exec ip netns exec "$host" unshare --uts --ipc --mount --pid --fork \\
    --kill-child sh -c '
mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm &&
"$2" -I -S -c "import socket, sys; socket.sethostname(sys.argv[1])" "$0" &&
exec sh -c "$1"' "$host" "$*" {python}
'''
_ENTER_PATH = Path('/run/enter')


def enter() -> None:
    """Goes on in namespaces of this process's own, or raises ValueError.

    Call it first: outside, the same command line is run again, inside, and
    this process ends with its exit code.
    """
    if _INSIDE in os.environ:
        return
    # Root has folders of tools on the path that others have not.
    path = os.environ.get('PATH', os.defpath) + ':/usr/sbin:/sbin'
    for tool in 'ip', 'tc', 'mount', 'setpriv', 'unshare':
        if not shutil.which(tool, path=path):
            raise ValueError(f'virtual hosts need {tool}; install iproute2 '
                             'and util-linux')
    if (starter := find_starter(os.environ)).family != 'MPICH':
        raise ValueError("virtual hosts need MPICH's mpiexec, and "
                         f'{starter.words[0]} is {starter.family}')
    # As root, who owns files of others, too, no user namespace is needed.
    user = ['--user', '--map-root-user'] if os.geteuid() else []
    # A session of its own: Ctrl-C ends it at once, by its kill, in silence.
    process = subprocess.Popen(
        ['setpriv', '--pdeathsig', 'KILL', 'unshare', *user, '--net',
         '--mount', '--uts', '--ipc', '--pid', '--fork', '--kill-child', '--',
         'sh', '-c', _FIRST, 'sh', sys.executable, *sys.orig_argv[1:]],
        start_new_session=True, env={**os.environ, 'PATH': path, _INSIDE: '1'})
    try:
        sys.exit(process.wait())
    finally:
        process.kill()
        process.wait()


class VirtualHosts:
    """Hosts around a switch, each with a cable; call :func:`enter` before.

    A process has one such network, which ends with it.

    Their names are ``node0`` and so on.  The rate is that of each cable and
    direction, in bit/s on the wire, Ethernet's headers included.  ``others``
    are names of more hosts, the last ones, that no cable slows down.
    """

    interface = INTERFACE       # that a host's address is on

    def __init__(self, hosts: int, rate: float,
                 others: Sequence[str] = ()) -> None:
        self.rate = rate
        self.hosts = [*(f'node{index}' for index in range(hosts)), *others]
        if not 2 <= len(self.hosts) <= 250:
            raise ValueError(
                f'there can be 2 to 250 hosts, not {len(self.hosts)}')
        if _INSIDE not in os.environ:   # it is the machine's own network
            raise ValueError('call enter() first')
        _ENTER_PATH.write_text(_ENTER.format(python=shlex.quote(
            sys.executable)))
        _ENTER_PATH.chmod(0o755)
        Path('/run/hosts').write_text('127.0.0.1 localhost\n' + ''.join(
            # An address's IPv6 form is asked for, too.
            f'{address} {host}\n::ffff:{address} {host}\n'
            for index, host in enumerate(self.hosts)
            for address in self.addresses(index)))
        self.call(None, 'mount', '--bind', '/run/hosts', '/etc/hosts')
        self.ip(None, [
            f'link add {INTERFACE} type bridge stp_state 0 forward_delay 0 '
            'mcast_snooping 0', f'addr add 10.77.0.254/24 dev {INTERFACE}',
            f'link set {INTERFACE} up'])
        for index, host in enumerate(self.hosts):
            self.ip(None, [
                f'netns add {host}', f'link add port{index} type veth peer '
                f'name {INTERFACE} netns {host}',
                f'link set port{index} master {INTERFACE} up'])
            self.ip(host, [f'addr add 10.77.0.{index + 1}/24 dev {INTERFACE}',
                           'link set lo up', f'link set {INTERFACE} up'])
            if index < hosts:
                self.shape(host, INTERFACE)
                self.shape(None, f'port{index}')
        for place in (None, *self.hosts):
            self.call(place, 'sh', '-c', _SETTINGS)

    def addresses(self, host: int) -> list[str]:
        """The IPv4 addresses of a host, by number; its own one first."""
        return [f'10.77.0.{host + 1}']

    def run(self, command: Sequence[str], each: int = 1,
            env: Mapping[str, str] | None = None,
            timeout: float | None = None) -> int:
        """Runs a command in ranks on all hosts; returns the exit code.

        Rank r is on host ``r // each``.  Raises subprocess.TimeoutExpired
        after so many seconds, when all processes in hosts have been ended.
        """
        process = subprocess.Popen(
            [*find_starter(os.environ).words, '-launcher', 'ssh',
             '-launcher-exec', str(_ENTER_PATH), '-iface', INTERFACE, '-hosts',
             ','.join(f'{host}:{each}' for host in self.hosts), '-n',
             str(each * len(self.hosts)), *command],
            stdin=subprocess.DEVNULL, env={
                **os.environ, 'UCX_TLS': 'tcp,self',
                'UCX_NET_DEVICES': self.interface, **(env or {})})
        try:
            return process.wait(timeout)
        finally:
            process.kill()
            process.wait()
            for host in self.hosts:
                for pid in self.call(None, 'ip', 'netns', 'pids', host
                                     ).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def call(self, host: str | None, *command: str, lines: str = '') -> str:
        """Runs a tool in a host (None: at the switch); returns its output."""
        place = ['ip', 'netns', 'exec', host] if host else []
        done = subprocess.run([*place, *command], input=lines,
                              capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f'{" ".join(command)} fails here: '
                             + ' '.join((done.stderr or done.stdout).split()))
        return done.stdout

    def ip(self, host: str | None, lines: Sequence[str]) -> None:
        """Does these commands of ``ip`` in a host, or the switch."""
        self.call(host, 'ip', '-batch', '-', lines='\n'.join(lines))

    def shape(self, host: str | None, device: str) -> None:
        """Gives what a device sends the rate."""
        self.call(host, 'tc', 'qdisc', 'replace', 'dev', device, 'root',
                  'tbf', 'rate', f'{self.rate:.0f}bit', 'burst', str(BURST),
                  'latency', _LATENCY)


def main() -> int:
    """Runs the command line; returns the exit code of the ranks."""
    parser = Parser(
        prog='python -m chainer_fp8pipe.launcher.virtual_hosts',
        description=__doc__, usage='%(prog)s [options] -- COMMAND ...')
    parser.add_argument('--hosts', type=count, default=4, metavar='N',
                        help='default: 4')
    parser.add_argument('--rate', type=as_type(parse_rate), default='100mbit',
                        help='of each cable and direction, in kbit, mbit or '
                        'gbit a second (default: 100mbit)')
    parser.add_argument('--ranks-per-host', type=count, default=1, metavar='N',
                        help='default: 1')
    parser.add_argument('command', nargs='+', metavar='COMMAND')
    options = parser.parse_args()
    try:
        enter()
        return VirtualHosts(options.hosts, options.rate).run(
            options.command, options.ranks_per_host)
    except ValueError as error:
        parser.exit(1, f'{error}\n')


if __name__ == '__main__':
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
