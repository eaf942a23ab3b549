"""A rank that dies without a word is named, and nothing else is."""
import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import uuid

from chainer_fp8pipe.mpi.failure._witness_process import (
    _Process,
    _Rank,
    _Witness,
)

import pytest

from tests.images.processes import eventually, is_alive
from tests.ranks import end_with_parent, environment, mpiexec, run_script

pytestmark = pytest.mark.skipif(
    not hasattr(os, 'pidfd_open'), reason='there is no witness here')

SCRIPT = """
import contextlib, os, signal, sys, threading, time
import chainer_fp8pipe
from chainer_fp8pipe import ProcessGrid, create_communicator
from chainer_fp8pipe.mpi.failure import witness
from chainer_fp8pipe.mpi.failure.watch import watch
from mpi4py import MPI
world = MPI.COMM_WORLD

{functions}

said = []
say = witness._line.say
witness._line.say = lambda message: (say(message), said.append(message))

def when_watched(how, who=''):
    # In a thread, as the rank is to be deep in MPI by then.
    def die():
        # It is watched a moment before it has said who it is.
        while not (any(who.encode() in message for message in said)
                   and is_watched(os.getpid())):
            time.sleep(0.02)
        how()
    if world.rank == {dying}:
        os.write(1, f'{{os.getpid()}} will die\\n'.encode())
        threading.Thread(target=die, daemon=True).start()

def wait_for_ever():
    MPI.COMM_SELF.Dup().Recv(bytearray(1), 0)

{body}
"""


def witnesses():
    """Processes of all witnesses that there are."""
    found = []
    for name in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(
                f'/proc/{name}/cmdline') as file:
            if '_witness_process.py' in file.read():
                found.append(name)
    return found


def is_watched(pid):
    """Whether a witness has opened a process."""
    for name in witnesses():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f'/proc/{name}/fdinfo'):
                with open(f'/proc/{name}/fdinfo/{fd}') as file:
                    if f'Pid:\t{pid}\n' in file.read():
                        return True
    return False


class Job:
    """What a script does, and the processes that come of it."""

    def __init__(self, path):
        self._path = path
        self._mark = f'TEST_OF_WITNESS={uuid.uuid4()}'
        name, _, value = self._mark.partition('=')
        self.environment = {**environment(), name: value}

    def script(self, body, dying=-1):
        self._path.write_text(SCRIPT.format(
            functions=inspect.getsource(witnesses)
            + inspect.getsource(is_watched), body=body, dying=dying))
        return str(self._path)

    def start(self, ranks, body, dying=-1, command=()):
        return subprocess.Popen(
            [*mpiexec(ranks), sys.executable, *command,
             self.script(body, dying)],
            env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent)

    def processes(self):
        """Those that are alive."""
        found = []
        for name in filter(str.isdigit, os.listdir('/proc')):
            with contextlib.suppress(OSError), open(
                    f'/proc/{name}/environ') as file:
                if self._mark in file.read() and is_alive(name):
                    found.append(int(name))
        return found

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leaves_nothing(self):
        return eventually(lambda: not self.processes())


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / 'script.py')
    yield job
    job.end()


@pytest.fixture
def run(job, monkeypatch):
    def run(ranks, body, dying=-1):
        with monkeypatch.context() as patch:
            for name, value in job.environment.items():
                patch.setenv(name, value)
            done = run_script(ranks, job.script(body, dying), timeout=300)
        assert job.leaves_nothing()
        return done
    return run


def named(done):
    """What was said about whom, and by whom it was expected to be."""
    lines = re.findall('^chainer_fp8pipe: (.*)$', done.stderr, re.MULTILINE)
    assert done.returncode != 0
    assert lines, done.stderr
    # The launcher kills the others, of which one may be seen to go on a busy
    # machine: as the line says, the earliest is the cause.
    assert len(lines) <= 2, done.stderr
    first = min(lines, key=lambda line: re.findall(r'\d\d:\d\d:[\d.]+',
                                                   line))
    who, pid, how = re.fullmatch(
        r'(.*), process (\d+) on host \S+, (.*) in the middle of the job '
        r'\(.*\)', first).groups()
    assert f'{pid} will die\n' in done.stdout
    return who, how


KILLED = 'was killed by SIGKILL (the system does that when memory is short)'


@pytest.mark.parametrize(('ranks', 'dying', 'body', 'who'), [
    (3, 1, "create_communicator('float32')", 'rank 1 of 3 (worker)'),
    (3, 0, "create_communicator('naive')", 'rank 0 of 3 (worker)'),
    (3, 2, "create_communicator('fp8', algorithm='aggregator')",
     'rank 2 of 3 (aggregator 0)'),
    (2, 1, "create_communicator('fp8', ProcessGrid(world, pipeline=2).data)",
     'rank 1 of 2 (stage 1)'),
    (4, 3, "create_communicator('fp8', ProcessGrid(world, pipeline=2).data)",
     'rank 3 of 4 (stage 1 of replica 1)'),
])
def test_a_killed_rank_is_named_with_what_it_was(run, ranks, dying, body,
                                                 who):
    done = run(ranks, f"""
when_watched(lambda: os.kill(os.getpid(), signal.SIGKILL), {who!r})
{body}
wait_for_ever()
""", dying)
    assert named(done) == (who, KILLED)


@pytest.mark.parametrize(('dying', 'action', 'how'), [
    (2, 'os.kill(os.getpid(), signal.SIGSEGV)', 'was killed by SIGSEGV'),
    (0, 'os._exit(7)', 'ended with exit code 7, without an exception or '
     'MPI_Finalize,'),
])
def test_a_crashed_or_exited_rank_is_named(run, dying, action, how):
    done = run(3, f"""
watch(world)
when_watched(lambda: {action})
wait_for_ever()
""", dying)
    assert named(done) == (f'rank {dying} of 3 (worker)', how)


def test_a_rank_is_named_at_once_though_a_fork_of_it_goes_on(job):
    launcher = job.start(2, """
import warnings
from chainer_fp8pipe.mpi.failure.witness import say_goodbye
watch(world)
warnings.simplefilter('ignore')     # Python 3.12 has one for such forks
def fork_and_die():
    if not os.fork():
        say_goodbye()       # is not its to say
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)
when_watched(fork_and_die)
wait_for_ever()
""", 1)
    # The fork has all that the rank had open, so that launchers may wait.
    line = next(filter(None, map(str.strip, launcher.stderr)))
    assert line.startswith('chainer_fp8pipe: rank 1 of 2 (worker), process')
    assert KILLED in line
    job.end()
    launcher.communicate(timeout=300)


def test_ranks_that_outlive_a_signal_are_watched_on(run):
    done = run(2, """
signal.signal(signal.SIGINT, lambda *_: None)
watch(world)
def send_and_die():
    os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(0.3)         # what it ends would be gone by then
    os.kill(os.getpid(), signal.SIGKILL)
when_watched(send_and_die)
wait_for_ever()
""", 0)
    assert named(done) == ('rank 0 of 2 (worker)', KILLED)


def test_a_rank_that_ends_all_ranks_is_not_named_a_second_time(run):
    done = run(2, """
from chainer_fp8pipe.mpi.failure import abort
class NoGroups:         # a launcher that kills rank after rank
    rank, size = world.rank, world.size
    def Abort(self, code):
        os.kill(os.getpid(), signal.SIGKILL)
class Mpi:
    COMM_WORLD = NoGroups()
watch(world)
abort.MPI = Mpi
when_watched(lambda: abort.end_all_ranks('so it goes\\n', 3))
wait_for_ever()
""", 1)
    assert done.returncode != 0
    assert 'so it goes' in done.stderr
    assert 'chainer_fp8pipe: ' not in done.stderr


def test_the_last_role_counts_and_ranks_are_watched_once(run):
    done = run(4, """
watch(world.Split(world.rank % 2), 'stage 0')
watch(world, 'stage 1')
watch(world)
when_watched(lambda: os.kill(os.getpid(), signal.SIGKILL))
wait_for_ever()
""", 3)
    assert named(done) == ('rank 3 of 4 (stage 1)', KILLED)
    assert 'if there are several such lines, the earliest is the cause' in (
        done.stderr)


@pytest.mark.parametrize(('body', 'code'), [
    ('', 0),
    ('sys.exit(3)', 3),
    ('MPI.Finalize(); os._exit(0)', 0),
    ('world.rank or world.Abort(3); wait_for_ever()', 3),
    ('world.rank and wait_for_ever(); raise KeyError("so it goes")', 1),
])
def test_an_end_that_is_meant_or_explained_is_not_a_death(run, body, code):
    done = run(2, f"""
from chainer_fp8pipe.mpi.failure.abort import abort_on_exception
abort_on_exception()
watch(world)
while not is_watched(os.getpid()):
    time.sleep(0.02)
world.Barrier()
{body}
""")
    assert (done.returncode, 'chainer_fp8pipe: ' in done.stderr) == (
        code, False)
    assert ('KeyError' in body) == ('rank 0 of 2 failed' in done.stderr)


@pytest.mark.parametrize('number', [
    signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_names_nobody_and_leaves_nothing(job, number):
    launcher = job.start(3, """
from chainer_fp8pipe.mpi.failure.abort import abort_on_exception
abort_on_exception()
watch(world)
while not is_watched(os.getpid()):
    time.sleep(0.02)
world.Barrier()
world.rank or os.write(1, b'ready\\n')
time.sleep(1000)
""")
    assert launcher.stdout.readline() == 'ready\n'
    assert len(job.processes()) >= 3 + 2
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    assert 'chainer_fp8pipe: ' not in errors
    assert job.leaves_nothing()


@pytest.mark.parametrize(('ranks', 'before'), [
    (1, ''),
    (2, "os.environ['CHAINER_FP8PIPE_WITNESS'] = '0'"),
    (2, 'del os.pidfd_open'),
    (2, "sys.executable = '/no/python'"),
])
def test_a_job_without_a_witness_runs_as_before(run, ranks, before):
    done = run(ranks, f"""
{before}
def environment(name):
    with contextlib.suppress(OSError), open(f'/proc/{{name}}/environ') as file:
        return file.read()
watch(world, 'stage 0')
own = environment('self').partition('TEST_OF_WITNESS=')[2].partition('\\0')[0]
assert own
found = [name for name in witnesses() if own in (environment(name) or '')]
os.write(1, f'{{found}}\\n'.encode())
""")
    assert (done.returncode, done.stdout, done.stderr) == (
        0, '[]\n' * ranks, '')


def test_ranks_that_differ_in_the_switch_do_not_wait(run):
    done = run(3, """
if world.rank != 1:
    os.environ['CHAINER_FP8PIPE_WITNESS'] = '0'
watch(world)
when_watched(lambda: os.kill(os.getpid(), signal.SIGKILL))
wait_for_ever()
""", 1)
    assert named(done) == ('rank 1 of 3 (worker)', KILLED)


@pytest.mark.parametrize(('action', 'how'), [
    ('os.kill(os.getpid(), 9)', KILLED),
    ('os.kill(os.getpid(), 15)', 'was killed by SIGTERM'),
    ('os.kill(os.getpid(), 40)', 'was killed by signal 40'),
    ('os._exit(5)', 'ended with exit code 5, without an exception or '
     'MPI_Finalize,'),
])
def test_how_a_process_ended_is_known_before_its_parent_asks(action, how):
    with subprocess.Popen([sys.executable, '-c',
                           f'import os, sys; sys.stdin.read(); {action}'],
                          stdin=subprocess.PIPE) as process:
        rank = _Process(process.pid)
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert rank.in_words() == how
    # Whether the kernel still knows then depends on it.
    assert rank.in_words() in (how, 'was killed or crashed')


@pytest.mark.parametrize(('of_rank', 'of_sentinel', 'named'), [
    (15, 15, False), (15, 9, True), (9, 9, True), (9, 15, True)])
def test_a_rank_that_is_gone_before_the_sentinel_is_not_named_if_all_are_ended(
        of_rank, of_sentinel, named):
    with contextlib.ExitStack() as stack, socket.socket(
            socket.AF_UNIX) as listener:
        pipe = os.pipe()
        for end in pipe:
            stack.callback(os.close, end)
        made = []
        for kind, number in ((_Rank, of_rank), (_Process, of_sentinel)):
            process = stack.enter_context(subprocess.Popen(
                ['sleep', '100'], stdin=subprocess.DEVNULL))
            made.append(kind(process.pid))
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        rank, sentinel = made
        rank.name = 'rank 1'
        witness = _Witness(listener, pipe[1], sentinel)
        assert witness._is_cause(rank) == named
