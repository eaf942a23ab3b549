"""Hosts as namespaces that cannot outlive the process that made them.

Every host is a process that waits for the end of its standard input, in a
network, host name, IPC, process id and mount namespace of its own.  All hosts
lie in a further group of namespaces, the *fabric*, which holds the bridges
and runs ``mpiexec``.  Nothing has a name outside of it, so any number of
networks can exist at once.

The maker holds the other end of the fabric's standard input.  When it ends,
in whatever way, ``SIGKILL`` included, the fabric's first process reads the
end of the file and ends, and with it the kernel ends every process in the
hosts and takes the namespaces, devices, queues and mounts away.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

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

    def end_processes(self) -> None:
        """Ends every process in the hosts, other than their first."""
        for host in self.hosts:
            subprocess.run(self.inside(host, ['sh', '-c', 'kill -KILL -1']),
                           stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)

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
