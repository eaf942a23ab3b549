"""Jobs that die or stand still: who is named, and that nothing is left."""
import contextlib
import inspect
import os
import re
import signal
import uuid

from chainer_fp8pipe.mpi.watchdog.stall import ACTION, EXIT_CODE, SECONDS

import pytest
from mpi4py import MPI

from tests.images.processes import eventually, is_alive
from tests.ranks import environment, start_script

SCRIPT = """
import contextlib, os, signal, sys, threading, time
import chainer_fp8pipe      # and no Chainer, unless a job needs it
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

def die(how=lambda: os.kill(os.getpid(), 9)):
    # In a thread, as the rank may be deep in MPI by then.
    def dies():
        until_watched()
        os.write(1, f'{{os.getpid()}} will die\\n'.encode())
        how()
    threading.Thread(target=dies).start()

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
            if 'from watchdog.process import' in file.read():
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

    def has_two_nodes(self):
        """MPICH takes ranks 0 and 2, 1 and 3 for those of two nodes."""
        if MPI.get_vendor()[0] != 'MPICH':
            pytest.skip('needs MPICH, which can take one node for two '
                        '(MPIR_CVAR_NUM_CLIQUES)')
        self.environment['MPIR_CVAR_NUM_CLIQUES'] = '2'

    def start(self, ranks, body, command=()):
        """The launcher of a job whose script has this body."""
        self._path.write_text(SCRIPT.format(
            functions=inspect.getsource(watchdogs)
            + inspect.getsource(is_watched), body=body))
        return start_script(ranks, *command, self._path,
                            env=self.environment)

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
        pytest.skip('no watchdog without os.pidfd_open (Linux 5.3)')
    made = Job(tmp_path / 'script.py')
    yield made
    made.end()


# --- ends --------------------------------------------------------------------

KILLED = r'was killed by SIGKILL \(the system does that when memory is short\)'
GRID = """
chainer_fp8pipe.create_communicator(
    'fp8', chainer_fp8pipe.ProcessGrid(world, pipeline=2).data)
world.rank == 3 and die(lambda: os._exit(7))
wait_for_ever()
"""
SPLIT = """
watch(world.Split(world.rank % 2), 'stage 0')
watch(world, 'stage 1')
watch(world)
world.rank == 2 and die(lambda: os.kill(os.getpid(), 40))
wait_for_ever()
"""
AGGREGATOR = """
world.rank == 2 and die()
chainer_fp8pipe.create_communicator('fp8', algorithm='aggregator')
wait_for_ever()
"""
SWITCHED_OFF = """
if world.rank != 1:
    os.environ['CHAINER_FP8PIPE_WATCHDOG'] = '0'
watch(world)
world.rank == 1 and die()
wait_for_ever()
"""
WATCHED = """
abort_on_exception()
watch(world)
until_watched()
world.Barrier()
"""
# Ranks, what they do, exit code (None: not 0; ...: any), and who is named and
# why.
ENDS = {
    'a stage': (4, GRID, None, r'rank 3 of 4 \(stage 1 of replica 1\)',
                'ended with exit code 7, without an exception or '
                'MPI_Finalize,'),
    'watched in parts': (3, SPLIT, None, r'rank 2 of 3 \(stage 1\)',
                         'was killed by signal 40'),
    # Others are not ended by it, but killed by the launcher then.
    'ended': (2, WATCHED + 'world.rank or die(lambda: os.kill(os.getpid(), '
              '15)); wait_for_ever()', None, r'rank 0 of 2 \(worker\)',
              'was killed by SIGTERM'),
    'an aggregator': (3, AGGREGATOR, None, r'rank 2 of 3 \(aggregator 0\)',
                      KILLED),
    # Ranks that differ in the switch do not wait for each other.
    'the only one': (3, SWITCHED_OFF, None, r'rank 1 of 3 \(worker\)',
                     KILLED),
    'one of two nodes': (
        4, WATCHED + 'world.rank == 3 and die(); wait_for_ever()', None,
        'rank 3 of 4 .*', KILLED),
    'the first of two nodes': (
        4, WATCHED + 'world.rank or die(lambda: os.kill(os.getpid(), 11)); '
        'wait_for_ever()', None, 'rank 0 of 4 .*', 'was killed by SIGSEGV'),
    # What is meant, or explained, is no death.
    'all': (2, WATCHED, 0, '', ''),
    'exit': (2, WATCHED + 'sys.exit(3)', 3, '', ''),
    # MPICH's launcher, which hears of MPI_Finalize when a rank exits, kills
    # one that is still in it.
    'finalized': (2, WATCHED + 'MPI.Finalize(); os._exit(0)', ..., '', ''),
    'aborted': (2, WATCHED + 'world.rank or world.Abort(3); wait_for_ever()',
                3, '', ''),
    'an error in one of two nodes': (
        4, WATCHED + 'world.rank == 2 or wait_for_ever(); '
        'raise KeyError("so it goes")', 1, 'rank 2 of 4 failed', ''),
}


@pytest.mark.parametrize('kind', ENDS)
def test_a_dead_rank_is_named_with_what_it_was(job, kind):
    ranks, body, wanted, who, how = ENDS[kind]
    if 'two nodes' in kind:
        job.has_two_nodes()
    code, output, errors = job.run(ranks, body)
    assert code == wanted or wanted is ... or (
        wanted is None and code), errors
    assert re.search(who, errors), errors
    found = re.findall('^chainer_fp8pipe: (.*), process (\\d+) on host \\S+, '
                       '(.*) in the middle of the job', errors, re.MULTILINE)
    assert len(found) == bool(how), errors
    for name, pid, words in found:
        assert re.fullmatch(who, name)
        assert re.fullmatch(how, words)
        assert f'{pid} will die\n' in output


def test_a_rank_is_named_at_once_though_a_fork_of_it_goes_on(job):
    launcher = job.start(2, WATCHED + """
import warnings
warnings.simplefilter('ignore')     # Python 3.12 has one for such forks
def fork_and_die():
    from chainer_fp8pipe.mpi import finalizing
    if not os.fork():
        finalizing._work()          # says goodbye, which is not its to say
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)
world.rank == 1 and die(fork_and_die)
wait_for_ever()
""")
    # The fork has all that the rank had open, so that launchers may wait.
    line = next(filter(None, map(str.strip, launcher.stderr)))
    assert re.match(r'chainer_fp8pipe: rank 1 of 2 \(worker\), process .* '
                    + KILLED, line)
    job.end()
    launcher.communicate(timeout=300)


@pytest.mark.parametrize('number', [
    signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_names_nobody_and_leaves_nothing(job, number):
    launcher = job.start(3, WATCHED + """
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
communicator = chainer_fp8pipe.create_communicator(
    'fp8', warmup=1, overlap={overlap!r})
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
INSIDE = ('from chainer_fp8pipe.allreduce.engine import Engine; '
          f'Engine.submit = lambda *given: {STOP}')
LOOP = 'while True: pass'
BROKEN = 'gone or stopped'


@pytest.fixture
def watched(job):
    job.environment.update({SECONDS: '1', 'PYTHONHASHSEED': '1'})
    return job


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
    'it is stopped': (3, FILES + train(1, STOP, True), '1', BROKEN, [
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
    'it is stopped on one of two nodes': (4, train(1, STOP), '1', BROKEN, [
        rf'rank {other} of 4 \(worker\), process' for other in (0, 2, 3)]),
    # Without --communicator: updates of ChainerMN's own count, too.
    'run': (2, train(1, STOP).replace(
        "chainer_fp8pipe.create_communicator(\n    'fp8', warmup=1, "
        'overlap=False)',
        "chainermn.create_communicator('naive')"), '1', BROKEN, []),
}


@pytest.mark.parametrize('kind', STALLS)
def test_the_rank_for_which_others_wait_is_named(watched, kind):
    ranks, body, who, why, said = STALLS[kind]
    if 'two nodes' in kind:
        watched.has_two_nodes()
    code, _, errors = watched.run(ranks, body, [
        '-m', 'chainer_fp8pipe', 'run'] if kind == 'run' else [])
    assert code == EXIT_CODE, errors
    assert cause(errors) == (who, why)
    for pattern in said:
        assert re.search(pattern, errors), errors


@pytest.mark.parametrize('rank', [0, 1])
def test_a_host_from_which_nothing_comes_is_the_cause(watched, rank):
    """Its first rank and watchdog are stopped, which looks alike outside."""
    watched.has_two_nodes()
    launcher = watched.start(4, train(rank, f'stop_watchdog(); {STOP}')
                               .replace('for step', 'time.sleep(1.5)\n'
                                        'for step'))    # they know each other
    _, errors = launcher.communicate(timeout=200)
    watched.end()         # the watchdog is still stopped
    assert launcher.returncode == EXIT_CODE, errors
    who, why = cause(errors)
    assert (str(rank) in who, why) == (True, BROKEN)
    assert 'nothing is heard of its host' in errors


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
import chainer_fp8pipe.mpi.watchdog.stall as settings
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
    code, _, errors = job.run(
        2, "chainer_fp8pipe.create_communicator('float32')")
    assert code != 0
    assert f'{SECONDS} must be seconds' in errors
