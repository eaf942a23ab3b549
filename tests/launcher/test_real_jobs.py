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

import pytest

from tests.images.processes import eventually
from tests.ranks import end_with_parent, environment, mpiexec
from tests.test_main import SCRIPT

pytestmark = pytest.mark.skipif(sys.platform != 'linux',
                                reason='processes are found in /proc')


class Launched:
    """A launcher with two real ranks, and all processes that come of it."""

    def __init__(self, folder, epochs):
        (folder / 'train.py').write_text(SCRIPT)
        self.output = folder / 'output'
        with open(self.output, 'w') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'chainer_fp8pipe', 'launch', '-n', '2',
                 '--snapshots', 'saved', '--every', '7 iterations',
                 '--communicator', 'fp8', '--warmup', '5', 'train.py',
                 '--epoch', str(epochs)],
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

    def launched(epochs=6):
        jobs.append(Launched(tmp_path, epochs))
        return jobs[-1]
    yield launched
    for job in jobs:
        job.process.kill()
        job.process.wait()


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The weights of a job that nothing has stopped."""
    job = Launched(tmp_path_factory.mktemp('undisturbed'), 6)
    assert job.process.wait(300) == 0, job.said()
    return weights(job.said())


def test_ranks_killed_at_random_moments_end_with_the_undisturbed_bits(
        launched, undisturbed):
    job = launched()
    for time_of in range(1, 3):
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
    job = launched(10_000)
    job.wait_for('trains: update')
    mark = job.mark()
    assert len(marked(mark)) >= 4       # mpiexec, its proxy and two ranks
    job.process.kill()
    job.process.wait()
    assert eventually(lambda: not marked(mark), 300)
