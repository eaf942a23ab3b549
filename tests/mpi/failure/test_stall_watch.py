"""A job that stands still says where, names the cause, and ends."""
import os
import re
import signal

from chainer_fp8pipe.mpi.failure.stall_settings import (
    ACTION,
    EXIT_CODE,
    SECONDS,
)

import pytest

from .test_witness import Job

pytestmark = pytest.mark.skipif(
    not hasattr(os, 'pidfd_open'), reason='there is no witness here')

TRAIN = """
import chainer, chainer.functions as F, chainer.links as L, chainermn, numpy
from chainer_fp8pipe.allreduce.bucket import BucketQueue

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def loop_for_ever():
    while True:
        pass

def stop_inside_the_exchange():
    communicator._reducer._queue.submit = lambda *given: stop()

numpy.random.seed(1)
communicator = create_communicator('fp8', warmup=1, overlap={overlap!r})
model = L.Classifier(chainer.Sequential(L.Linear(100, 200), L.Linear(200, 9)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), communicator).setup(model)
generator = numpy.random.default_rng(world.rank)
for step in range(7):
    if step == 4 and world.rank == {rank}:
        {fault}
    optimizer.update(model, generator.random((4, 100), 'f'),
                     numpy.arange(4, dtype='i'))
total = b''.join(parameter.array.tobytes() for parameter in model.params())
os.write(1, f'{{hash(total)}} after all\\n'.encode())
"""

PIPELINE = """
import chainer, chainer.links as L, numpy
from chainer_fp8pipe import Divisible, PipelineUpdater
calls = 0
def hang(x):
    global calls
    calls += 1
    while calls == 14:      # the second micro-batch of the fourth step
        time.sleep(0.1)
    return x
model = Divisible(hang, L.Linear(4, 4), L.Linear(4, 3)).stage(
    world, balance='layers')
data = chainer.datasets.TupleDataset(
    numpy.ones((8, 4), 'f'), numpy.zeros(8, 'i'))
updater = PipelineUpdater(
    chainer.iterators.SerialIterator(data, 8),
    chainer.optimizers.SGD().setup(model), world, micro_batches=4)
for _ in range(7):
    updater.update()
"""


CHAINERMN = """
import chainer, chainer.functions as F, chainer.links as L, chainermn, numpy
from chainer import training
communicator = chainermn.create_communicator('naive')
model = L.Classifier(L.Linear(100, 9))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), communicator).setup(model)
data = chainer.datasets.TupleDataset(
    numpy.ones((40, 100), 'f'), numpy.zeros(40, 'i'))
trainer = training.Trainer(training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 4), optimizer), (7, 'iteration'))
def fail(trainer):
    if trainer.updater.iteration == 4 and world.rank == 1:
        {fault}
trainer.extend(fail, trigger=(1, 'iteration'))
trainer.run()
"""


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / 'script.py')
    # Far more than a step takes, on a busy machine, too.
    job.environment.update({SECONDS: '4', 'PYTHONHASHSEED': '1'})
    yield job
    job.end()


def ended(job, ranks, body):
    """What a job prints that is ended because it stands still."""
    launcher = job.start(ranks, body)
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == EXIT_CODE, errors
    assert job.leaves_nothing()
    return errors


def cause(errors):
    """The ranks that are named, and why."""
    found = re.search(r'the job stands still: .*; the cause: ranks? '
                      r'([\d, ]+), (.*):\n((?:  .*\n)*)', errors)
    assert found, errors
    return found.groups()


@pytest.mark.parametrize(('rank', 'overlap'), [
    (0, False), (1, 'next_forward')])
def test_a_stopped_rank_is_the_cause(job, rank, overlap):
    errors = ended(job, 3, TRAIN.format(rank=rank, overlap=overlap,
                                        fault='stop()'))
    who, why, lines = cause(errors)
    assert (who, why) == (str(rank), 'gone or stopped')
    assert re.fullmatch(
        rf'  rank {rank} of 3 \(worker\), process \d+ on host \S+, is '
        r'stopped \(SIGSTOP, or a debugger\)\n', lines)
    for other in {0, 1, 2} - {rank}:
        assert re.search(
            rf'rank {other} of 3 .* has finished no update for \d+ seconds '
            r'.*; it waits for other ranks, .*script.py.*\n  File ', errors)


def test_ranks_say_which_frame_they_wait_for(job):
    errors = ended(job, 2, TRAIN.format(
        rank=1, overlap=False, fault='stop_inside_the_exchange()'))
    assert cause(errors)[0] == '1'
    assert re.search(
        r'it waits for other ranks, for frame 0 of bucket 0 \(.*\) \(the sum, '
        r'step \d+\) from rank 1; at script.py', errors)


@pytest.mark.parametrize('call', ['allreduce(1)', 'Barrier()'])
def test_a_rank_that_calls_one_collective_more_is_the_cause(job, call):
    errors = ended(job, 3, TRAIN.format(rank=2, overlap=False,
                                        fault=f'world.{call}'))
    who, why, lines = cause(errors)
    assert (who, why) == ('2', 'in another call than the others')
    assert f'in MPI: {call.partition("(")[0]}; at script.py' in lines
    assert 'the others:\n  rank 0 of 3' in errors


@pytest.mark.parametrize(('fault', 'expected'), [
    ('os.kill(os.getpid(), signal.SIGSTOP)', 'gone or stopped'),
    ('world.Barrier()', 'in another call than the others')])
def test_updates_of_chainermns_own_communicators_count(job, fault, expected):
    """As ``run`` without options has unmodified scripts make them."""
    launcher = job.start(3, CHAINERMN.format(fault=fault),
                         command=['-m', 'chainer_fp8pipe', 'run'])
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == EXIT_CODE, errors
    assert job.leaves_nothing()
    who, why, _ = cause(errors)
    assert (who, why) == ('1', expected)


def test_a_rank_in_an_endless_loop_is_the_cause(job):
    errors = ended(job, 2, TRAIN.format(rank=0, overlap=True,
                                        fault='loop_for_ever()'))
    who, why, lines = cause(errors)
    assert (who, why) == ('0', 'behind which others wait')
    assert 'does not wait for any rank: at script.py' in lines
    assert 'in loop_for_ever\n' in errors


def test_a_stage_that_hangs_is_the_cause(job):
    errors = ended(job, 2, PIPELINE)
    assert cause(errors)[:2] == ('0', 'behind which others wait')
    assert ('for its input from rank 0, in stage 1, micro-batch 1; '
            in errors)


def test_a_job_that_is_only_warned_goes_on_with_the_same_bits(job):
    job.environment[ACTION] = 'warn'
    usual = job.start(2, TRAIN.format(rank=1, overlap=False, fault='pass'))
    wanted, errors = usual.communicate(timeout=200)
    assert 'stands still' not in errors
    launcher = job.start(2, TRAIN.format(rank=1, overlap=False,
                                         fault='stop()'))
    for line in launcher.stderr:
        if found := re.search(r'process (\d+) .* is stopped', line):
            os.kill(int(found[1]), signal.SIGCONT)
            break
    found, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
    assert sorted(found.split()) == sorted(wanted.split())
    assert job.leaves_nothing()


def test_a_variable_with_a_wrong_value_is_an_error_on_all_ranks(job):
    job.environment[SECONDS] = 'soon'
    launcher = job.start(2, "create_communicator('float32')")
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode != 0
    assert f'{SECONDS} must be seconds' in errors


def test_a_job_that_does_not_want_it_has_no_thread_for_it(job):
    job.environment[SECONDS] = '0'
    launcher = job.start(2, """
create_communicator('float32')
assert not [one for one in threading.enumerate() if 'stall' in one.name]
""")
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
