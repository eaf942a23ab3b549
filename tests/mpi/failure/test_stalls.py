"""A job that stands still says where, names the cause, and ends."""
import os
import re
import signal

from chainer_fp8pipe.mpi.failure.stall import (
    ACTION,
    EXIT_CODE,
    SECONDS,
)

import pytest
from mpi4py import MPI

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
    # All ranks call it, and each rehearses half of the micro-batches first.
    calls.append(model_is_ready and updater.iteration)
    while world.rank == 0 and calls.count(2) == 4:
        time.sleep(0.1)     # the second micro-batch of the third step
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
STOP = 'os.kill(os.getpid(), signal.SIGSTOP)'
INSIDE = ('communicator._reducer._queues[0].submit = '
          f'lambda *given: {STOP}')
LOOP = """
    while True:
        pass
"""


@pytest.fixture
def watched(job):
    job.environment.update({SECONDS: '1', 'PYTHONHASHSEED': '1'})
    return job


def ended(job, ranks, body, command=()):
    """What a job prints that is ended because it stands still."""
    code, _, errors = job.run(ranks, body, command)
    assert code == EXIT_CODE, errors
    return errors


def cause(errors):
    """The ranks that are named, and why."""
    found = re.search(r'the job stands still: .*; the cause: ranks? '
                      r'([\d, ]+), (.*):\n((?:  .*\n)*)', errors)
    assert found, errors
    return found.groups()


def train(rank, fault, overlap=False):
    return TRAIN.format(rank=rank, overlap=overlap, fault=fault)


def test_a_stopped_rank_is_the_cause(watched):
    errors = ended(watched, 3, train(1, STOP, 'next_forward'))
    who, why, lines = cause(errors)
    assert (who, why) == ('1', 'gone or stopped')
    assert re.match(r'  rank 1 of 3 \(worker\), process \d+ on host \S+, is '
                    r'stopped \(SIGSTOP, or a debugger\)', lines)
    for other in (0, 2):
        assert re.search(
            rf'rank {other} of 3 .* has finished no update for \d+ seconds'
            r'.*; it waits for other ranks, .*script.py.*\n  File ', errors)


def test_ranks_say_which_frame_they_wait_for(watched):
    errors = ended(watched, 2, train(1, INSIDE))
    assert cause(errors)[0] == '1'
    assert re.search(
        r'it waits for other ranks, for frame 0 of bucket 0 \(.*\) \(the sum, '
        r'step \d+\) from rank 1; at script.py', errors)


@pytest.mark.parametrize('call', ['allreduce(1)', 'Barrier()'])
def test_a_rank_that_calls_one_collective_more_is_the_cause(watched, call):
    errors = ended(watched, 3, train(2, f'world.{call}'))
    who, why, lines = cause(errors)
    assert (who, why) == ('2', 'in another call than the others')
    assert f'in MPI: {call.partition("(")[0]}; at script.py' in lines
    assert 'the others:\n  rank 0 of 3' in errors


def test_updates_of_chainermns_own_communicators_count(watched):
    """As ``run`` without options has unmodified scripts make them."""
    errors = ended(watched, 2, train(1, STOP).replace(
        "create_communicator('fp8', warmup=1, overlap=False)",
        "chainermn.create_communicator('naive')"),
        ['-m', 'chainer_fp8pipe', 'run'])
    assert cause(errors)[:2] == ('1', 'gone or stopped')


def test_a_rank_in_an_endless_loop_is_the_cause(watched):
    errors = ended(watched, 2, train(0, LOOP, True))
    who, why, lines = cause(errors)
    assert (who, why) == ('0', 'behind which others wait')
    assert 'does not wait for any rank: at script.py' in lines
    assert 'in fail\n' in errors


def test_a_rank_whose_program_has_ended_is_the_cause(watched):
    errors = ended(watched, 2, train(1, 'sys.exit(0)'))
    assert cause(errors)[:2] == ('1', 'gone or stopped')


def test_ranks_that_have_all_lost_the_interpreter_are_killed(watched):
    code, _, errors = watched.run(2, train(
        0, 'world.bcast(1)').replace('step == 4', 'step == 4 and (world.rank '
                                     'or world.bcast(1, 1)) == 0'))
    assert code != 0
    assert 'in MPI: bcast' in errors


def test_a_stage_that_hangs_is_the_cause(watched):
    errors = ended(watched, 2, PIPELINE)
    assert cause(errors)[:2] == ('0', 'behind which others wait')
    assert ('for its input from rank 0, in stage 1, micro-batch 1; '
            in errors)


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


HEALTHY = """
import chainer_fp8pipe.mpi.failure.stall as settings
settings._LEAST = 0.5
BEFORE
""" + TRAIN.format(rank=-1, overlap=False, fault='pass') + """
BODY
os.write(1, b'well\\n')
"""


@pytest.mark.parametrize(('before', 'body'), [
    # Rank 0 works on when the others' programs have ended.
    ('', 'if world.rank == 0: time.sleep(4)'),
    # All wait for the result of a process that they have spawned.
    ("""
if len(sys.argv) > 1:
    time.sleep(4)
    parent = MPI.Comm.Get_parent()
    for rank in range(parent.remote_size):
        parent.Send(bytearray(1), rank)
    parent.Disconnect()
    sys.exit()
""", """
spawned = world.Spawn(sys.executable, [sys.argv[0], 'child'])
spawned.Recv(bytearray(1), 0)
spawned.Disconnect()
"""),
    # One evaluates, the others wait for it.
    ('', """
if world.rank == 0:
    time.sleep(4)
world.Barrier()
"""),
])
def test_a_job_that_may_go_on_is_not_ended(job, before, body):
    """The limit is half a second, and two where all ranks wait."""
    job.environment.pop(SECONDS, None)
    code, output, errors = job.run(
        2, HEALTHY.replace('BEFORE', before).replace('BODY', body))
    assert (code, output.count('well')) == (0, 2), errors
    assert 'ending all ranks' not in errors


def test_the_signal_for_its_stack_does_not_end_a_rank_that_has_ended(job):
    """It is in MPI_Finalize, and its interpreter's handlers are gone."""
    job.environment[SECONDS] = '0'
    code, _, errors = job.run(2, """
from chainer_fp8pipe.mpi.failure import watch as module
watch(world)
pid, (number, _) = world.bcast((os.getpid(), module._dump()), 1)
if world.rank == 0:
    for _ in range(20):
        time.sleep(0.1)
        os.kill(pid, number)
""")
    assert code == 0, errors


def test_a_variable_with_a_wrong_value_is_an_error_on_all_ranks(job):
    job.environment[SECONDS] = 'soon'
    code, _, errors = job.run(2, "create_communicator('float32')")
    assert code != 0
    assert f'{SECONDS} must be seconds' in errors


def test_more_open_files_than_select_takes_are_no_fault(watched):
    errors = ended(watched, 2, """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (
    4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [open(os.devnull) for _ in range(1100)]
""" + train(1, STOP))
    assert cause(errors)[0] == '1'


@pytest.fixture
def two_nodes(watched):
    """MPICH takes ranks 0 and 2, 1 and 3 for those of two nodes."""
    if MPI.get_vendor()[0] != 'MPICH':
        pytest.skip('only MPICH can do that')
    watched.environment['MPIR_CVAR_NUM_CLIQUES'] = '2'
    return watched


@pytest.mark.parametrize('rank', [1, 2])
def test_a_stopped_rank_of_two_nodes_is_the_cause(two_nodes, rank):
    errors = ended(two_nodes, 4, train(rank, STOP))
    assert cause(errors)[:2] == (str(rank), 'gone or stopped')
    assert errors.count('the job stands still') == 1
    for other in {0, 1, 2, 3} - {rank}:
        assert f'rank {other} of 4 (worker), process' in errors


@pytest.mark.parametrize('rank', [0, 1])
def test_a_host_from_which_nothing_comes_is_the_cause(two_nodes, rank):
    """Its first rank and watchdog are stopped, which looks alike outside."""
    launcher = two_nodes.start(4, train(rank, """
    for name in watchdogs():
        with contextlib.suppress(OSError):
            status = open(f'/proc/{name}/status').read()
            if f'PPid:\\t{os.getpid()}\\n' in status:
                os.kill(int(name), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
""").replace('for step', 'time.sleep(1.5)     # till they know each other\n'
             'for step'))
    _, errors = launcher.communicate(timeout=200)
    two_nodes.end()         # the watchdog is still stopped
    assert launcher.returncode == EXIT_CODE, errors
    who, why, _ = cause(errors)
    assert why == 'gone or stopped'
    assert str(rank) in who
    assert 'nothing is heard of its host' in errors


@pytest.mark.parametrize(('rank', 'how', 'said'), [
    (3, 'os.kill(os.getpid(), 9)', r'rank 3 of 4 .* was killed by SIGKILL'),
    (0, 'os.kill(os.getpid(), 11)', r'rank 0 of 4 .* was killed by SIGSEGV'),
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
