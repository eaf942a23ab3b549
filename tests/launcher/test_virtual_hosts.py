"""Virtual hosts are apart, have their rates, and leave nothing behind."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from chainer_fp8pipe.launcher import virtual_hosts

import pytest

from tests.images.processes import eventually
from tests.ranks import environment, run_script

_BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'
_MIB = 1 << 20
_COMMAND = [sys.executable, '-m', 'chainer_fp8pipe.launcher.virtual_hosts']
# One write, lest the lines of ranks be mixed.
_SAYS = [sys.executable, '-c', '''
import socket
from mpi4py import MPI
print(f'{MPI.COMM_WORLD.rank} {MPI.Get_processor_name()} '
      f'{socket.gethostname()}\\n', end='', flush=True)
''']
_EXCHANGES = f'''
from mpi4py import MPI
from chainer_fp8pipe import create_communicator
import chainer, numpy
comm = create_communicator('float32')
model = chainer.Link()
with model.init_scope():
    model.x = chainer.Parameter(numpy.ones({_MIB // 4}, 'f'))
model.x.grad = numpy.ones({_MIB // 4}, 'f')
comm.multi_node_mean_grad(model)
comm.finalize()
'''
# All that is measured, in one process, as a network takes a second.
_MEASURES = f'''
import json, subprocess, sys, time
sys.path.append({str(_BENCHMARKS)!r})
from network import Star, begin
begin()
said = {{}}

def sent(network, each, *command):
    def so_far():
        return {{(host, device): int(network.call(
            host, 'cat', f'/sys/class/net/{{device}}/statistics/tx_bytes'))
            for host in network.hosts for device in network.call(
                host, 'ls', '/sys/class/net').split()}}
    before = so_far()
    assert not network.run([sys.executable, '-c', *command], each,
                           timeout=300)
    return {{'/'.join(name): count - before[name]
            for name, count in so_far().items()}}

star = Star(2, 200e6, switch=True)
said['sent'] = sent(star, 1, {_EXCHANGES!r})
said['limits'] = [star.call(host, 'tc', 'qdisc', 'show', 'dev', 'eth0')
                  for host in ('node0', 'node1')]
said['control'] = [star.call(
    host, 'cat', '/proc/sys/net/ipv4/tcp_congestion_control')
    for host in ('node0', 'switch', None)]
try:
    # In a session of its own it does not notice the end of mpiexec.
    star.run(['setsid', '--fork', '--wait', 'sleep', '1000'], timeout=1)
except subprocess.TimeoutExpired:
    while star.call(None, 'ip', 'netns', 'pids', 'node0'):
        time.sleep(0.05)        # it takes the kernel a moment
    said['ended'] = True
print('\\n' + json.dumps(said))
'''


@pytest.fixture(scope='module')
def possible():
    """Skips where there can be no virtual hosts, and says why."""
    done = _run('--', 'true')
    assert 'Traceback' not in done.stderr
    if done.returncode:
        pytest.skip(done.stderr)


@pytest.fixture(scope='module')
def measured(possible):
    done = run_script(0, '-c', _MEASURES, timeout=390)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _run(*arguments, before=(), **variables):
    return subprocess.run(
        [*before, *_COMMAND, *arguments], capture_output=True, text=True,
        env={**environment(), **variables}, timeout=300)


# As root, and as somebody else whose files are the same.
@pytest.mark.parametrize('before', [
    [], ['unshare', '--user', '--map-user=1000', '--map-group=1000', '--']])
def test_ranks_are_placed_host_by_host_under_the_hosts_names(
        possible, before):
    if subprocess.run([*before, 'true'], capture_output=True).returncode:
        pytest.skip('nobody can be another user here')
    done = _run('--hosts', '2', '--ranks-per-host', '2', '--', *_SAYS,
                before=before)
    assert sorted(done.stdout.splitlines()) == [
        f'{rank} {host} {host}' for rank, host in enumerate(
            ['node0', 'node0', 'node1', 'node1'])], done.stderr


def test_a_job_leaves_no_message_behind(possible):
    """UCX would warn of each, at the end of every job over hosts."""
    done = _run('--hosts', '3', '--', sys.executable, '-c', _EXCHANGES,
                CHAINER_FP8PIPE_STALL='100')
    assert done.returncode == 0, done.stderr
    assert 'was not matched' not in done.stdout + done.stderr


def test_links_carry_messages_at_their_rate_and_leave_nothing(measured):
    # Ranks of a node exchange gradients in memory that they find in /proc.
    for host in 'node0', 'node1', 'switch':
        assert 4 / 3 * _MIB < measured['sent'][f'{host}/eth0'] < 2 * _MIB
    assert all('rate 200Mbit' in limit for limit in measured['limits'])
    # Congestion control does not depend on the system.
    assert measured['control'] == 3 * ['reno\n']
    assert measured['ended']        # of the command that took too long


@pytest.mark.parametrize(('number', 'code'), [
    (signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_is_left_after_a_signal(possible, tmp_path, number, code):
    """Neither of ranks, nor of what has left them for a session."""
    mark = str(tmp_path / 'started')
    stays = f'touch {mark}; setsid --fork --wait sh -c "sleep 1000" {mark}'

    def left():
        found = []
        for path in Path('/proc').glob('[0-9]*/cmdline'):
            with contextlib.suppress(OSError):      # it has ended since
                if mark in path.read_text() and 'sleep' in path.read_text():
                    found.append(path)
        return found
    with subprocess.Popen(
            [*_COMMAND, '--hosts', '2', '--', 'sh', '-c', stays],
            stderr=subprocess.DEVNULL, env=environment(),
            # It is ignored in what a shell runs in the background.
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.default_int_handler)) as maker:
        try:
            assert eventually(lambda: os.path.exists(mark) and left(), 300)
            maker.send_signal(number)
            assert maker.wait(300) == code
        finally:
            maker.kill()
    assert eventually(lambda: not left(), 300)


def test_without_a_tool_one_line_names_its_package(monkeypatch):
    monkeypatch.setattr(
        virtual_hosts.shutil, 'which',
        lambda tool, path: None if tool == 'ip' else f'/bin/{tool}')
    with pytest.raises(ValueError, match=re.escape(
            'virtual hosts need ip; install iproute2')):
        virtual_hosts.enter()


def test_where_the_kernel_refuses_one_line_says_so(possible, tmp_path):
    tool, says = tmp_path / 'unshare', 'unshare failed: not permitted'
    tool.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 1\n')
    tool.chmod(0o755)
    done = _run('--', 'true', PATH=f'{tmp_path}:{os.environ["PATH"]}')
    assert (done.returncode, done.stdout, done.stderr) == (1, '', f'{says}\n')


@pytest.mark.parametrize(('arguments', 'said'), [
    (['--rate', '100mbt', '--', 'true'], "'100mbt' is no rate"),
    (['--rate', '100', '--', 'true'], 'write it with a unit'),
    (['--hosts', '1', '--', 'true'], 'there can be 2 to 250 hosts, not 1'),
    # As where somebody is root and forgets to enter.
    (['--', 'true'], 'call enter() first'),
    ([], 'arguments are required: COMMAND')])
def test_a_wrong_argument_is_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(virtual_hosts, 'enter', lambda: None)
    monkeypatch.setattr(sys, 'argv', ['virtual_hosts', *arguments])
    with pytest.raises(SystemExit):
        virtual_hosts.main()
    assert said in capsys.readouterr().err
