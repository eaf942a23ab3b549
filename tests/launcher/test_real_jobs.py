"""Jobs of real ranks that die, under ``python -m chainer_fp8pipe launch``."""
import contextlib
import glob
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

from chainer_fp8pipe.launcher.attempt import marked
from chainer_fp8pipe.report.launch_protocol import LAUNCHED
from chainer_fp8pipe.training.snapshots.file import manifest_of, read

import pytest

from tests.images.processes import eventually
from tests.ranks import end_with_parent, environment, mpiexec

pytestmark = pytest.mark.skipif(sys.platform != 'linux',
                                reason='processes are found in /proc')

#: An unmodified script of ChainerMN's; an update takes a hundredth second.
SCRIPT = '''
import time
def after_update(trainer):
    time.sleep(0.01)
HEAD
import chainer, chainermn, numpy
import chainer.functions as F, chainer.links as L
from chainer import training
comm = chainermn.create_communicator('naive')
numpy.random.seed(comm.rank)
model = L.Classifier(chainer.Sequential(L.Linear(8, 16), F.relu,
                                        L.Linear(16, 2)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.Adam(0.02), comm).setup(model)
points = numpy.random.RandomState(1).rand(300, 8).astype('f')
data = chainer.datasets.TupleDataset(
    points, (points.sum(1) > 4).astype('i'))
data = chainermn.scatter_dataset(data, comm, shuffle=True, seed=0)
updater = training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 10), optimizer)
trainer = training.Trainer(updater, (UPDATES, 'iteration'))
trainer.extend(after_update, trigger=(1, 'iteration'))
trainer.run()
if comm.rank == 0:
    print('weights', [p.array.sum().tobytes().hex() for p in model.params()])
'''


#: In a script: its second snapshot and those that follow get no further than
#: their first member while there is a file ``hold``, nor updates further than
#: the 20th.  A rank raises between two updates: in the middle of one, the
#: exchange would have all ranks raise.
HELD = '''
import contextlib, glob, os, signal, time
from chainer_fp8pipe.training.snapshots import file as snapshot_file
from mpi4py import MPI
signals = []
def after_update(trainer):
    time.sleep(0.01)
    while trainer.updater.iteration > 20 and os.path.exists('hold') and (
            not signals):
        time.sleep(0.01)
    if signals:
        raise RuntimeError('a rank that raises')
@contextlib.contextmanager
def held(*given, written_whole=snapshot_file.written_whole):
    with written_whole(*given) as file:
        yield file
        while os.path.exists('hold') and len(glob.glob(
                'saved/snapshot_iter_7.ranks/rank?of2.npz')) == 2:
            time.sleep(0.01)
snapshot_file.written_whole = held
signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
if MPI.COMM_WORLD.rank == 0 and os.path.exists('saved'):
    names = sorted(name for name in os.listdir('saved')
                   if glob.glob(f'saved/{name}/*.npz'))
    # At once: other ranks write, too.
    os.write(1, ('found ' + ' '.join(names) + chr(10)).encode())
'''


class Launched:
    """A launcher with two real ranks, and all processes that come of it."""

    def __init__(self, folder, updates, head='', every='7 iterations'):
        (folder / 'train.py').write_text(
            SCRIPT.replace('UPDATES', str(updates)).replace('HEAD', head))
        self.folder, self.output = folder, folder / 'output'
        with open(self.output, 'w') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'chainer_fp8pipe', 'launch', '-n', '2',
                 '--snapshots', 'saved', '--every', every,
                 '--communicator', 'fp8', '--warmup', '5', 'train.py'],
                env={**environment(), 'MPIEXEC': shlex.join(mpiexec(2)[:-2])},
                cwd=folder, stdout=output, stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent)

    def said(self):
        return self.output.read_text()

    def wait_for(self, text, times=1):
        """Waits until something was said so many times, or to the end."""
        assert eventually(
            lambda: self.process.poll() is not None
            or self.said().count(text) >= times, 300), self.said()

    def wait_until_it_saves(self):
        """Waits until a snapshot is whole and another is being written."""
        assert eventually(
            lambda: len([*self.folder.glob(
                'saved/snapshot_iter_7.ranks/rank?of2.npz')]) == 2
            and any(self.folder.glob('saved/*/*.partial')),
            300), self.said()

    def ranks(self):
        """The processes of ranks, in their order."""
        return sorted(int(name) for name in children_of(children_of(
            children_of([self.process.pid]))) if is_rank(name))

    def mark(self):
        for child in children_of([self.process.pid]):
            with open(f'/proc/{child}/environ') as file:
                if found := re.search(f'{LAUNCHED}=\\w+', file.read()):
                    return found[0]
        raise AssertionError('there is no job')


def children_of(pids):
    found = []
    for pid in pids:
        for path in glob.glob(f'/proc/{pid}/task/*/children'):
            with open(path) as file:
                found += file.read().split()
    return found


def is_rank(pid):
    with open(f'/proc/{pid}/cmdline') as file:
        return file.read().split('\0')[1:4] == [
            '-m', 'chainer_fp8pipe', 'run']


def weights(said):
    return re.findall('^weights (.*)$', said, re.MULTILINE)


@pytest.fixture
def launched(tmp_path):
    jobs = []

    def launched(updates=30, **options):
        jobs.append(Launched(tmp_path, updates, **options))
        return jobs[-1]
    yield launched
    for job in jobs:
        job.process.kill()
        job.process.wait()


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The weights of a job that nothing has stopped."""
    job = Launched(tmp_path_factory.mktemp('undisturbed'), 30)
    assert job.process.wait(300) == 0, job.said()
    found, = weights(job.said())
    return [found]


def test_ranks_killed_at_random_moments_end_with_the_undisturbed_bits(
        launched, undisturbed):
    job = launched()
    for time_of in range(1, 4):
        job.wait_for('trains: update', time_of)
        time.sleep(random.uniform(0, 0.3))
        with contextlib.suppress(OSError, IndexError):  # it has ended
            os.kill(random.choice(job.ranks()), signal.SIGKILL)
        if job.process.poll() is not None:
            break
    assert job.process.wait(300) == 0, job.said()
    # A rank may be killed when another has printed them already.
    assert set(weights(job.said())) == set(undisturbed)


def test_nothing_is_left_of_the_job_of_a_launcher_that_is_killed(launched):
    job = launched(100_000)
    job.wait_for('trains: update')
    mark = job.mark()
    assert len(marked(mark)) >= 4       # mpiexec, its proxy and two ranks
    job.process.kill()
    job.process.wait()
    assert eventually(lambda: not marked(mark), 300)


def check_older(job):
    """That the snapshot before the one that was being written is whole."""
    for rank in range(2):
        manifest = manifest_of(str(
            job.folder / f'saved/snapshot_iter_7.ranks/rank{rank}of2.npz'))
        read(manifest, manifest.digests)


def test_ranks_that_end_while_a_snapshot_is_written_take_no_older_one(
        launched, undisturbed):
    """And leave no part of the new one."""
    job = launched(head=HELD)
    (job.folder / 'hold').touch()
    endings = [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGUSR1),
               (1, signal.SIGUSR1)]
    for number, (rank, how) in enumerate(endings, 1):
        job.wait_for('trains: update', number)
        job.wait_until_it_saves()
        os.kill(job.ranks()[rank], how)
        job.wait_for(f'start {number} has ended')
        check_older(job)
    (job.folder / 'hold').unlink()
    assert job.process.wait(300) == 0, job.said()
    # What mpiexec says of ends may stand before it.
    found = re.findall('found (snapshot.*)$', job.said(), re.MULTILINE)
    assert found == ['snapshot_iter_7.ranks'] * len(endings), job.said()
    assert weights(job.said()) == undisturbed
    assert {path.name for path in (job.folder / 'saved').iterdir()} == {
        'trainers.json', 'snapshot_iter_28.ranks', 'snapshot_iter_30.ranks'}


@pytest.mark.slow
def test_a_launcher_killed_while_a_snapshot_is_written_goes_on_from_the_older(
        launched, undisturbed):
    job = launched(head=HELD)
    (job.folder / 'hold').touch()
    job.wait_for('trains: update')
    job.wait_until_it_saves()
    mark = job.mark()
    job.process.kill()
    job.process.wait()
    assert eventually(lambda: not marked(mark))
    check_older(job)
    assert [*job.folder.glob('saved/*/*.partial')]
    again = launched(every='100 iterations')
    assert again.process.wait(300) == 0, again.said()
    assert 'trains: update 8 is done' in again.said()
    assert weights(again.said()) == undisturbed
    assert {path.name for path in (job.folder / 'saved').iterdir()} == {
        'trainers.json', 'snapshot_iter_7.ranks', 'snapshot_iter_30.ranks'}
