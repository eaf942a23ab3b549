"""Jobs that die or stand still: who is named, and that nothing is left."""
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import uuid

from chainer_fp8pipe.mpi.watchdog import ACTION, EXIT_CODE, SECONDS

import pytest
from mpi4py import MPI

from tests.images.processes import eventually, is_alive
from tests.ranks import end_with_parent, environment, mpiexec

SCRIPT = """
import contextlib, os, signal, sys, threading, time
import chainer_fp8pipe
from chainer_fp8pipe import ProcessGrid, create_communicator
from chainer_fp8pipe.mpi.abort import abort_on_exception
from chainer_fp8pipe.mpi.watch import watch
from mpi4py import MPI
world = MPI.COMM_WORLD

{functions}

def wait_for_ever():
    MPI.COMM_SELF.Dup().Recv(bytearray(1), 0)

def until_watched():
    while not is_watched(os.getpid()):
        time.sleep(0.02)
    world.Barrier()

def die(rank, how):
    # In a thread, as the rank is to be deep in MPI by then.
    until_watched()
    if world.rank == rank:
        os.write(1, f'{{os.getpid()}} will die\\n'.encode())
        threading.Timer(0.1, how).start()
    wait_for_ever()

def stop_watchdog():
    for name in watchdogs():
        with contextlib.suppress(OSError):
            if f'PPid:\\t{{os.getpid()}}\\n' in open(
                    f'/proc/{{name}}/status').read():
                os.kill(int(name), signal.SIGSTOP)

{body}
"""


def watchdogs():
    """Processes of all watchdogs that there are."""
    found = []
    for name in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(
                f'/proc/{name}/cmdline') as file:
            if 'mpi/watchdog.py' in file.read():
                found.append(name)
    return found


def is_watched(pid):
    """Whether a watchdog has opened a process."""
    for name in watchdogs():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f'/proc/{name}/fdinfo'):
                with open(f'/proc/{name}/fdinfo/{fd}') as file:
                    if f'Pid:\t{pid}\n' in file.read():
                        return True
    return False


class Job:
    """What a script does on several ranks, and the processes that come of it.

    Args:
        path: Where the script is written.
    """

    def __init__(self, path):
        self._path, self._mark = path, str(uuid.uuid4())
        self.environment = {**environment(), 'TEST_OF_WATCHDOG': self._mark}

    def start(self, ranks, body, command=()):
        """The launcher of a job whose script has this body."""
        self._path.write_text(SCRIPT.format(
            functions=inspect.getsource(watchdogs)
            + inspect.getsource(is_watched), body=body))
        return subprocess.Popen(
            [*mpiexec(ranks), sys.executable, *command, str(self._path)],
            env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent)

    def run(self, ranks, body, command=()):
        """Its exit code, output and errors; leaves nothing behind."""
        launcher = self.start(ranks, body, command)
        output, errors = launcher.communicate(timeout=300)
        assert self.leaves_nothing()
        return launcher.returncode, output, errors

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
    if not hasattr(os, 'pidfd_open'):
        pytest.skip('there is no watchdog here')
    made = Job(tmp_path / 'script.py')
    yield made
    made.end()


# --- deaths ------------------------------------------------------------------

KILLED = 'was killed by SIGKILL (the system does that when memory is short)'
DIES = 'os.kill(os.getpid(), {})'
AGGREGATOR = """
if world.rank == 2:
    def dies():
        while not is_watched(os.getpid()):
            time.sleep(0.02)
        os.write(1, f'{os.getpid()} will die\\n'.encode())
        os.kill(os.getpid(), 9)
    threading.Thread(target=dies).start()
create_communicator('fp8', algorithm='aggregator')
"""
SWITCHED_OFF = """
if world.rank != 1:
    os.environ['CHAINER_FP8PIPE_WATCHDOG'] = '0'
watch(world)
if world.rank == 1:
    while not is_watched(os.getpid()):
        time.sleep(0.02)
    os.write(1, f'{os.getpid()} will die\\n'.encode())
    os.kill(os.getpid(), 9)
wait_for_ever()
"""


@pytest.mark.parametrize(('ranks', 'dying', 'make', 'how', 'who', 'words'), [
    (3, 0, "create_communicator('naive')", DIES.format(11),
     'rank 0 of 3 (worker)', 'was killed by SIGSEGV'),
    (4, 3, "create_communicator('fp8', ProcessGrid(world, pipeline=2).data)",
     'os._exit(7)', 'rank 3 of 4 (stage 1 of replica 1)',
     'ended with exit code 7, without an exception or MPI_Finalize,'),
    (3, 2, "watch(world.Split(world.rank % 2), 'stage 0'); "
     "watch(world, 'stage 1'); watch(world)", DIES.format(40),
     'rank 2 of 3 (stage 1)', 'was killed by signal 40'),
    # Others are not ended by it, but killed by the launcher then.
    (2, 0, 'watch(world)', DIES.format(15), 'rank 0 of 2 (worker)',
     'was killed by SIGTERM'),
    (3, 2, AGGREGATOR, 'None', 'rank 2 of 3 (aggregator 0)', KILLED),
    # Ranks that differ in the switch do not wait for each other.
    (3, 1, SWITCHED_OFF, 'None', 'rank 1 of 3 (worker)', KILLED),
])
def test_a_dead_rank_is_named_with_what_it_was(job, ranks, dying, make, how,
                                               who, words):
    code, output, errors = job.run(
        ranks, f'{make}\ndie({dying}, lambda: {how})')
    assert code != 0
    found = re.findall('^chainer_fp8pipe: (.*), process (\\d+) on host \\S+, '
                       '(.*) in the middle of the job', errors, re.MULTILINE)
    assert [(found[0][0], found[0][2])] == [(who, words)], errors
    assert f'{found[0][1]} will die\n' in output


def test_a_rank_is_named_at_once_though_a_fork_of_it_goes_on(job):
    launcher = job.start(2, """
import warnings
warnings.simplefilter('ignore')     # Python 3.12 has one for such forks
def fork_and_die():
    from chainer_fp8pipe.mpi import finalizing
    if not os.fork():
        finalizing._work()          # says goodbye, which is not its to say
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)
watch(world)
die(1, fork_and_die)
""")
    # The fork has all that the rank had open, so that launchers may wait.
    line = next(filter(None, map(str.strip, launcher.stderr)))
    assert line.startswith('chainer_fp8pipe: rank 1 of 2 (worker), process')
    assert KILLED in line
    job.end()
    launcher.communicate(timeout=300)


@pytest.mark.parametrize(('body', 'code'), [
    ('', 0),
    ('sys.exit(3)', 3),
    ('MPI.Finalize(); os._exit(0)', 0),
    ('world.rank or world.Abort(3); wait_for_ever()', 3),
    ('world.rank and wait_for_ever(); raise KeyError("so it goes")', 1),
])
def test_an_end_that_is_meant_or_explained_is_not_a_death(job, body, code):
    found, _, errors = job.run(
        2, f'abort_on_exception()\nwatch(world)\nuntil_watched()\n{body}')
    assert (found, 'chainer_fp8pipe: ' in errors) == (code, False)
    assert ('KeyError' in body) == ('rank 0 of 2 failed' in errors)


@pytest.mark.parametrize('number', [
    signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_names_nobody_and_leaves_nothing(job, number):
    launcher = job.start(3, """
abort_on_exception()
watch(world)
until_watched()
world.rank or os.write(1, b'ready\\n')
time.sleep(1000)
""")
    assert launcher.stdout.readline() == 'ready\n'
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    assert 'chainer_fp8pipe: ' not in errors
    assert job.leaves_nothing()


@pytest.mark.parametrize(('ranks', 'before'), [
    (1, ''),
    (2, "os.environ['CHAINER_FP8PIPE_WATCHDOG'] = '0'"),
    (2, "sys.executable = '/no/python'"),
])
def test_a_job_without_a_watchdog_runs_as_before(job, ranks, before):
    code, output, errors = job.run(ranks, f"""
{before}
watch(world, 'stage 0')
print(len([one for one in threading.enumerate() if 'watch' in one.name]))
""")        # ranks print into each other's lines
    assert (code, sorted(output), errors) == (
        0, sorted('0\n' * ranks), '')


# --- stalls ------------------------------------------------------------------

TRAIN = """
import chainer, chainer.functions as F, chainer.links as L, chainermn, numpy
def fail():
    {fault}
numpy.random.seed(1)
communicator = create_communicator('fp8', warmup=1, overlap={overlap!r})
model = L.Classifier(chainer.Sequential(L.Linear(100, 200), L.Linear(200, 9)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), communicator).setup(model)
generator = numpy.random.default_rng(world.rank)
for step in range(6):
    if step == 4 and world.rank == {rank}:
        fail()
    optimizer.update(model, generator.random((4, 100), 'f'),
                     numpy.arange(4, dtype='i'))
total = b''.join(parameter.array.tobytes() for parameter in model.params())
os.write(1, f'{{hash(total)}} after all\\n'.encode())
"""
PIPELINE = """
import chainer, chainer.links as L, numpy
from chainer_fp8pipe import Divisible, PipelineUpdater
calls = []
def hang(x):
    calls.append(model_is_ready and updater.iteration)
    while world.rank == 0 and calls.count(2) == 4:
        time.sleep(0.1)     # in the third step
    return x
model_is_ready = False
model = Divisible(hang, L.Linear(4, 4), L.Linear(4, 3)).stage(
    world, balance='layers')
data = chainer.datasets.TupleDataset(
    numpy.ones((8, 4), 'f'), numpy.zeros(8, 'i'))
updater = PipelineUpdater(
    chainer.iterators.SerialIterator(data, 8),
    chainer.optimizers.SGD().setup(model), world, micro_batches=4)
model_is_ready = True
for _ in range(4):
    updater.update()
"""
def train(rank, fault, overlap=False):
    """What one rank does in the fifth update."""
    return TRAIN.format(rank=rank, overlap=overlap, fault=fault)


FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (
    4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [open(os.devnull) for _ in range(1100)]
"""
STOP = 'os.kill(os.getpid(), signal.SIGSTOP)'
INSIDE = f'communicator._reducer.queues[0].submit = lambda *given: {STOP}'
LOOP = 'while True: pass'
BROKEN = 'gone or stopped'


@pytest.fixture
def watched(job):
    job.environment.update({SECONDS: '1', 'PYTHONHASHSEED': '1'})
    return job


@pytest.fixture
def two_nodes(watched):
    """MPICH takes ranks 0 and 2, 1 and 3 for those of two nodes."""
    if MPI.get_vendor()[0] != 'MPICH':
        pytest.skip('only MPICH can do that')
    watched.environment['MPIR_CVAR_NUM_CLIQUES'] = '2'
    return watched


def cause(errors):
    """The ranks that are named, and why."""
    found = re.search(r'the job stands still: .*; the cause: ranks? '
                      r'([\d, ]+), (.*):\n(?:  .*\n)*', errors)
    assert found, errors
    assert errors.count('the job stands still') == 1
    return found.groups()


# A row: the ranks, what they do, who is named and why, and what else is said.
STALLS = {
    # And has more files open than select takes.
    'it is stopped': (3, FILES + train(1, STOP, 'next_forward'), '1', BROKEN, [
        r'  rank 1 of 3 \(worker\), process \d+ on host \S+, is stopped '
        r'\(SIGSTOP, or a debugger\)',
        *(rf'rank {other} of 3 .* has finished no update for \d+ seconds.*; '
          r'it waits for other ranks, .*script.py.*\n  File '
          for other in (0, 2))]),
    'others know its frame': (2, train(1, INSIDE), '1', BROKEN, [
        r'it waits for other ranks, for frame 0 of bucket 0 \(.*\) \(the '
        r'sum, step \d+\) from rank 1; at script.py']),
    # This one keeps the interpreter while it waits, the next does not.
    'it calls one collective more': (
        3, train(2, 'world.allreduce(1)'), '2',
        'in another call than the others',
        ['in MPI: allreduce; at script.py', 'the others:\n  rank 0 of 3']),
    'it calls a barrier more': (
        3, train(2, 'world.Barrier()'), '2',
        'in another call than the others', ['in MPI: Barrier; at script.py']),
    'it loops for ever': (2, train(0, LOOP, True), '0',
                          'behind which others wait',
                          ['does not wait for any rank: at script.py',
                           'in fail\n']),
    'its program has ended': (2, train(1, 'sys.exit(0)'), '1', BROKEN, []),
    'a stage hangs': (2, PIPELINE, '0', 'behind which others wait', [
        r'for its input from rank 0, in stage 1, micro-batch \d; ']),
    # Without --communicator: updates of ChainerMN's own count, too.
    'run': (2, train(1, STOP).replace(
        "create_communicator('fp8', warmup=1, overlap=False)",
        "chainermn.create_communicator('naive')"), '1', BROKEN, []),
}


@pytest.mark.parametrize('kind', STALLS)
def test_the_rank_for_which_others_wait_is_named(watched, kind):
    ranks, body, who, why, said = STALLS[kind]
    code, _, errors = watched.run(ranks, body, [
        '-m', 'chainer_fp8pipe', 'run'] if kind == 'run' else [])
    assert code == EXIT_CODE, errors
    assert cause(errors) == (who, why)
    for pattern in said:
        assert re.search(pattern, errors), errors


def test_a_stopped_rank_of_two_nodes_is_the_cause(two_nodes):
    code, _, errors = two_nodes.run(4, train(1, STOP))
    assert code == EXIT_CODE, errors
    assert cause(errors) == ('1', BROKEN)
    for other in 0, 2, 3:
        assert f'rank {other} of 4 (worker), process' in errors


@pytest.mark.parametrize('rank', [0, 1])
def test_a_host_from_which_nothing_comes_is_the_cause(two_nodes, rank):
    """Its first rank and watchdog are stopped, which looks alike outside."""
    launcher = two_nodes.start(4, train(rank, f'stop_watchdog(); {STOP}')
                               .replace('for step', 'time.sleep(1.5)\n'
                                        'for step'))    # they know each other
    _, errors = launcher.communicate(timeout=200)
    two_nodes.end()         # the watchdog is still stopped
    assert launcher.returncode == EXIT_CODE, errors
    who, why = cause(errors)
    assert (str(rank) in who, why) == (True, BROKEN)
    assert 'nothing is heard of its host' in errors


@pytest.mark.parametrize(('rank', 'how', 'said'), [
    (3, DIES.format(9), r'rank 3 of 4 .* was killed by SIGKILL'),
    (0, DIES.format(11), r'rank 0 of 4 .* was killed by SIGSEGV'),
    (2, 'raise KeyError("so it goes")', 'rank 2 of 4 failed'),
])
def test_of_two_nodes_one_says_who_has_died(two_nodes, rank, how, said):
    code, _, errors = two_nodes.run(4, f"""
abort_on_exception()
watch(world)
until_watched()
if world.rank == {rank}:
    {how}
wait_for_ever()
""")
    assert code != 0
    assert re.search(said, errors), errors
    assert len(re.findall('in the middle of the job', errors)) == (
        'KeyError' not in how)


def test_ranks_that_have_all_lost_the_interpreter_are_killed(watched):
    code, _, errors = watched.run(2, train(
        0, 'world.bcast(1)').replace('step == 4', 'step == 4 and (world.rank '
                                     'or world.bcast(1, 1)) == 0'))
    assert code != 0
    assert 'in MPI: bcast' in errors


def test_a_job_that_is_only_warned_goes_on_with_the_same_bits(watched):
    watched.environment[ACTION] = 'warn'
    _, wanted, errors = watched.run(2, train(1, 'pass'))
    launcher = watched.start(2, train(1, STOP))
    for line in launcher.stderr:
        if found := re.search(r'process (\d+) .* is stopped', line):
            os.kill(int(found[1]), signal.SIGCONT)
            break
    found, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
    assert sorted(found.split()) == sorted(wanted.split())
    assert watched.leaves_nothing()


SPAWNED = """
if len(sys.argv) > 1:
    time.sleep(2)
    parent = MPI.Comm.Get_parent()
    for rank in range(parent.remote_size):
        parent.Send(bytearray(1), rank)
    parent.Disconnect()
    sys.exit()
"""


@pytest.mark.parametrize(('before', 'after'), [
    # One evaluates, the others wait for it; and works on when their programs
    # have ended.
    ('', """
if world.rank == 0: time.sleep(2)
world.Barrier()
if world.rank == 0: time.sleep(2)
"""),
    # All wait for the result of a process that they have spawned.
    (SPAWNED, """
spawned = world.Spawn(sys.executable, [sys.argv[0], 'child'])
spawned.Recv(bytearray(1), 0)
spawned.Disconnect()
"""),
])
def test_a_job_that_may_go_on_is_not_ended(job, before, after):
    """The limit is 0.3 seconds, and 1.2 where all ranks wait."""
    job.environment.pop(SECONDS, None)
    code, output, errors = job.run(2, f"""
import chainer_fp8pipe.mpi.watchdog as settings
settings._LEAST = 0.3
{before}
{train(-1, 'pass')}
{after}
os.write(1, b'well\\n')
""")
    assert (code, output.count('well')) == (0, 2), errors
    assert 'ending all ranks' not in errors


def test_the_signal_for_its_stack_does_not_end_a_rank_that_has_ended(job):
    """It is in MPI_Finalize, and its interpreter's handlers are gone."""
    job.environment[SECONDS] = '0'
    code, _, errors = job.run(2, """
from chainer_fp8pipe.mpi import watch as module
watch(world)
pid, (number, _) = world.bcast((os.getpid(), module._dump()), 1)
if world.rank == 0:
    for _ in range(10):
        time.sleep(0.1)
        os.kill(pid, number)
""")
    assert code == 0, errors


def test_a_variable_with_a_wrong_value_is_an_error_on_all_ranks(job):
    job.environment[SECONDS] = 'soon'
    code, _, errors = job.run(2, "create_communicator('float32')")
    assert code != 0
    assert f'{SECONDS} must be seconds' in errors
