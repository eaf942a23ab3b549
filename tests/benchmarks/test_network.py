"""The virtual network keeps its hosts apart, its rates, and nothing else."""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import network_probe
from benchmarks.network import Star, Torus, main, missing
from tests.ranks import environment

_ROOT = pathlib.Path(__file__).parents[2]
_MIB = 1 << 20
_SAYS = '''
import socket
from mpi4py import MPI
# One write, lest the lines of ranks be mixed.
print(f'{MPI.COMM_WORLD.rank} {MPI.Get_processor_name()} '
      f'{socket.gethostname()}\\n', end='', flush=True)
'''
_SENDS = f'''
import sys
import numpy
from mpi4py import MPI
comm, (source, to) = MPI.COMM_WORLD, map(int, sys.argv[1:])
if comm.rank == source:
    comm.Send(numpy.ones({_MIB}, numpy.uint8), to)
elif comm.rank == to:
    comm.Recv(numpy.empty({_MIB}, numpy.uint8), source)
'''
_WAITS = '''
import signal
from benchmarks.network import Star
# It is ignored in what a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
network = Star(2, 100e6)
print(*network.spaces.identities(), flush=True)
network.run(['sleep', '1000'])
'''


@pytest.fixture(scope='module')
def privileged():
    """Skips where there can be no network, and says what is missing."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope='module')
def star(privileged):
    with Star(2, 200e6, switch=True) as network:
        yield network


def _sent_by(network, *command, ranks_per_host=1):
    """Bytes sent per host and interface by a command."""
    before = network.counters()
    done = network.run([sys.executable, *command], ranks_per_host,
                       env=environment(), timeout=300, capture=True)
    assert done.returncode == 0, done.stderr
    return {host: {name: sent - before[host][name][0]
                   for name, (sent, _) in devices.items()}
            for host, devices in network.counters().items()}


def _processes(spaces):
    """The processes in these network namespaces."""
    found = set()
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):      # it has ended since
            if os.readlink(path / 'ns' / 'net') in spaces:
                found.add(path.name)
    return found


def _wait_until(condition):
    """Fails unless it becomes true soon."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _each_lies_between(low, measured, high):
    """Measures until each of some rates was once between two others.

    Where other programs need the cores less gets through, or more, as what
    has waited in a socket is read at once.  A wrong rate is always wrong.
    """
    end, seen = time.monotonic() + 300, [measured()]
    while not all(any(low < rate < high for rate in of)
                  for of in zip(*seen, strict=True)):
        assert time.monotonic() < end, f'{seen} is not {low} to {high}'
        seen.append(measured())


def test_ranks_are_placed_host_by_host_under_the_hosts_names(star):
    done = star.run([sys.executable, '-c', _SAYS], 2, env=environment(),
                    timeout=300, capture=True)
    assert sorted(done.stdout.splitlines()) == [
        f'{rank} {host} {host}' for rank, host in enumerate(
            ['node0', 'node0', 'node1', 'node1', 'switch', 'switch'])]


def test_messages_between_hosts_pass_the_links(star):
    sent = _sent_by(star, '-c', _SENDS, '0', '2', ranks_per_host=2)
    assert _MIB < sent['node0']['eth0'] < 1.3 * _MIB
    assert sent['node1']['eth0'] < 0.3 * _MIB
    assert sent['switch']['eth0'] < 0.3 * _MIB


def test_messages_inside_a_host_go_through_memory(star):
    sent = _sent_by(star, '-c', _SENDS, '0', '1', ranks_per_host=2)
    assert all(bytes_sent < 0.3 * _MIB for devices in sent.values()
               for bytes_sent in devices.values())


def test_payload_is_what_a_link_carries_less_headers(star):
    _each_lies_between(0.85 * star.rate, lambda: [
        rate for rates in star.rates().values() for rate in rates], star.rate)


@pytest.mark.parametrize(('arrivals', 'rate'), [
    ([0.5, 1.0, 1.5, 1.75, 9.0], 8 * 20 / 0.75),    # bits over seconds
    ([0.5, 9.0], 0), ([9.0], 0)])
def test_a_probe_counts_between_the_first_and_the_last_in_its_time(
        monkeypatch, arrivals, rate):
    """And finds none if it had the core too late for that."""
    monkeypatch.setattr(network_probe, 'time', SimpleNamespace(
        perf_counter=iter(arrivals).__next__))
    connection = SimpleNamespace(recv_into=lambda buffer: 10)
    assert network_probe.receive(connection, 1.0, 2.0) == pytest.approx(rate)


def test_congestion_control_does_not_depend_on_the_system(star):
    done = star.run(['cat', '/proc/sys/net/ipv4/tcp_congestion_control',
                     '/proc/sys/net/ipv4/tcp_early_retrans'],
                    timeout=300, capture=True)
    assert sorted(done.stdout.split()) == ['0'] * 3 + ['reno'] * 3
    assert star.describe().endswith('TCP reno')


def test_a_command_that_takes_too_long_is_ended_in_all_hosts(star):
    before = _processes(star.spaces.identities())
    with pytest.raises(subprocess.TimeoutExpired):
        # In a session of its own it does not notice the end of mpiexec.
        star.run(['setsid', '--fork', '--wait', 'sleep', '1000'], timeout=1)
    _wait_until(lambda: _processes(star.spaces.identities()) == before)
    assert star.run(['true'], timeout=300).returncode == 0


def test_hosts_of_a_torus_reach_each_neighbour_by_its_own_link(privileged):
    with Torus(3, 2, 1e9) as torus:
        assert torus.neighbours(0) == {1: 'to1', 2: 'to2', 4: 'to4'}
        assert len(torus.links) == 9
        sent = _sent_by(torus, '-c', _SENDS, '0', '4')
        assert sent['node0'].pop('to4') > _MIB
        assert all(bytes_sent < 0.3 * _MIB for devices in sent.values()
                   for bytes_sent in devices.values())


def test_two_networks_at_once_do_not_see_each_other(star, privileged):
    with Star(2, 100e6) as other:
        assert other.run(['true'], timeout=300).returncode == 0
        assert not (set(star.spaces.identities())
                    & set(other.spaces.identities()))
    assert star.run(['true'], timeout=300).returncode == 0


def test_nothing_is_left_after_an_exception(privileged):
    spaces = set()

    def fail():
        with Star(2, 100e6) as network:
            spaces.update(network.spaces.identities())
            subprocess.Popen(network.inside(0, ['sleep', '1000']))
            raise RuntimeError('while a process runs in a host')
    with pytest.raises(RuntimeError, match='while'):
        fail()
    assert spaces
    _wait_until(lambda: not _processes(spaces))


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM,
                                    signal.SIGINT])
def test_nothing_is_left_after_a_signal(privileged, number):
    with subprocess.Popen(
            [sys.executable, '-c', _WAITS], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=_ROOT,
            env=environment()) as maker:
        try:
            spaces = maker.stdout.readline().split()
            time.sleep(0.3)     # mpiexec is on its way
            maker.send_signal(number)
            assert maker.wait(300) != 0
        finally:
            maker.kill()
    assert len(spaces) == 3
    _wait_until(lambda: not _processes(spaces))


def _refusal(capsys, *arguments):
    """The one line that the command line says."""
    assert main([*arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ''
    assert said.err.count('\n') == 1
    return said.err


def test_without_root_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    assert 'needs root' in _refusal(capsys, 'star')


@pytest.mark.parametrize('lacking', ['ip', 'tc'])
def test_without_iproute2_one_line_says_so(
        capsys, monkeypatch, tmp_path, lacking):
    monkeypatch.setattr(os, 'geteuid', lambda: 0)
    for tool in {'ip', 'tc', 'nsenter', 'unshare', 'mount'} - {lacking}:
        _script(tmp_path / tool, 'exit 1')
    monkeypatch.setenv('PATH', str(tmp_path))
    assert f'needs {lacking} (iproute2)' in _refusal(capsys, 'torus')


@pytest.mark.parametrize(('tool', 'says'), [
    ('unshare', 'unshare failed: Operation not permitted'),
    ('tc', 'Error: Specified qdisc kind is unknown.')])
def test_where_the_kernel_refuses_one_line_says_so(
        capsys, monkeypatch, tmp_path, privileged, tool, says):
    _script(tmp_path / tool, f'echo "{says}" >&2; exit 2')
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    assert says in _refusal(capsys, 'star')


def _script(path, body):
    path.write_text(f'#!/bin/sh\n{body}\n')
    path.chmod(0o755)
