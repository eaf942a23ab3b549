"""Whatever is killed, no process and no memory is left."""
import os
import signal
import subprocess
import sys

import pytest

from tests.ranks import end_with_parent, environment, mpiexec

from .folders import make_folder
from .processes import eventually, holders, is_alive, memory_of

RANK = """
import os, sys
import chainer_fp8pipe
from chainer_fp8pipe.images import ImageFolder, RandomResizedCrop
from mpi4py.MPI import COMM_WORLD as comm
data = ImageFolder(sys.argv[1], RandomResizedCrop(8), shard=comm,
                   cache='memory')
iterator = data.iterator(3, workers=2, prefetch=4)
next(iterator)
print(comm.rank, os.getpid(), *iterator.worker_pids, flush=True)
while sys.argv[2] == 'busy':
    next(iterator)
    comm.Barrier()
sys.stdin.read() if sys.argv[2] == 'idle' else {}[sys.argv[2]]
"""


class Running:
    """A job of ranks that each have a cache and two workers."""

    def __init__(self, root, ranks, what):
        command = [sys.executable, '-c', RANK, root, what]
        self.job = subprocess.Popen(
            [*(mpiexec(ranks) if ranks > 1 else []), *command],
            env=environment(), stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=end_with_parent)
        self.pids, self.memory = {}, set()
        for _ in range(ranks):
            rank, *pids = map(int, self.job.stdout.readline().split())
            self.pids[rank] = pids
        for pid in self.all:
            self.memory |= memory_of(pid)

    @property
    def all(self):
        return [pid for pids in self.pids.values() for pid in pids]

    def is_gone(self):
        return not any(map(is_alive, self.all)) and not holders(self.memory)

    def end(self):
        self.job.terminate()        # a launcher ends its ranks then
        for pipe in self.job.stdin, self.job.stdout, self.job.stderr:
            pipe.close()
        self.job.wait()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(ranks, what='busy'):
        jobs.append(Running(make_folder(tmp_path / 'root', 40), ranks, what))
        return jobs[-1]
    yield start
    for job in jobs:
        job.end()


@pytest.mark.parametrize('ranks', [1, 2])
def test_a_rank_that_is_killed_takes_all_ranks_and_workers_with_it(
        start, ranks):
    job = start(ranks)
    assert eventually(lambda: len(holders(job.memory)) == 3 * ranks)
    os.kill(job.pids[0][0], signal.SIGKILL)     # it made the cache
    assert eventually(job.is_gone)


def test_a_killed_worker_ends_the_job_and_is_named(start):
    job = start(2)
    os.kill(job.pids[1][2], signal.SIGKILL)
    _, printed = job.job.communicate(timeout=300)
    assert job.job.returncode
    assert (f'worker 1 (process {job.pids[1][2]}) of this rank was killed by '
            'SIGKILL') in printed
    assert eventually(job.is_gone)


@pytest.mark.parametrize(('ranks', 'what', 'end', 'status'), [
    (1, 'mistake', lambda job: None, 1),
    (1, 'idle', lambda job: job.stdin.close(), 0),      # without finalize
    (2, 'busy', lambda job: job.terminate(), None),     # the launcher
])
def test_any_end_of_a_job_leaves_nothing(start, ranks, what, end, status):
    job = start(ranks, what)
    end(job.job)
    if status is not None:
        assert job.job.wait(300) == status
    assert eventually(job.is_gone)


CHILD = """
import os, sys, time
import chainer_fp8pipe
from chainer_fp8pipe.images import ImageFolder
from chainer_fp8pipe.images.transforms import RandomResizedCrop
iterator = ImageFolder(sys.argv[1], RandomResizedCrop(8)).iterator(3, 2)
next(iterator)
child = os.fork()       # it has the rank's ends of the pipes
if not child:
    time.sleep(1000)
print(child, *iterator.worker_pids, flush=True)
time.sleep(1000)
"""


def test_workers_end_even_if_a_fork_of_the_rank_goes_on(tmp_path):
    with subprocess.Popen(
            [sys.executable, '-c', CHILD, make_folder(tmp_path)],
            env=environment(), stdout=subprocess.PIPE, text=True,
            preexec_fn=end_with_parent) as rank:
        child, *workers = map(int, rank.stdout.readline().split())
        try:
            rank.kill()
            assert eventually(lambda: not any(map(is_alive, workers)))
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
