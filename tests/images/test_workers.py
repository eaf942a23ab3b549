"""Worker processes: how they start and grow, and that they always end."""
import os
import pathlib
import signal
import statistics
import subprocess

from chainer_fp8pipe.images import ImageFolder

import pytest

from tests.ranks import start_script

from .folders import Broken, crop, make_folder, stream
from .processes import descriptors, eventually, holders, is_alive, memory_of


def test_workers_load_no_mpi(tmp_path):
    iterator = ImageFolder(make_folder(tmp_path), crop()).iterator(4, 1)
    next(iterator)
    mapped = pathlib.Path(f'/proc/{iterator.worker_pids[0]}/maps').read_text()
    iterator.finalize()
    assert [name in mapped for name in ('numpy', 'mpi4py', 'libmpi')] == [
        True, False, False]


# Workers have this in their environment, and ranks do not.
FAILING = """
import os
if 'PYTHONSAFEPATH' in os.environ:
    raise ImportError('no such library here')
from chainer_fp8pipe.images import RandomResizedCrop
class OwnCrop(RandomResizedCrop):
    pass
"""


def test_a_transform_that_workers_cannot_import_ends_them_and_is_an_error(
        tmp_path, monkeypatch, capfd):
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    (tmp_path / 'own_crop.py').write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_crop  # type: ignore
    root = make_folder(tmp_path / 'root')
    iterator = ImageFolder(root, own_crop.OwnCrop(8)).iterator(4, workers=2)
    with pytest.raises(RuntimeError, match=(
            r'worker [01] .* ended with exit code 1; its own message is '
            r'above; .*with workers=0')):
        next(iterator)
    assert 'no such library here' in capfd.readouterr().err


class Here(type(crop())):
    pass


def test_a_transform_that_cannot_be_sent_is_an_error_with_the_remedy(
        tmp_path, monkeypatch):
    root = make_folder(tmp_path)
    transform = Broken()
    transform.something = lambda: None
    monkeypatch.setattr(Here, '__module__', '__main__')
    before = descriptors('pipe'), descriptors('memfd')
    for one, message in [(transform, 'use workers=0'),
                         (Here(8), 'defined in the main script')] * 2:
        with pytest.raises(ValueError, match=message):
            ImageFolder(root, one).iterator(4, 1)
    assert (descriptors('pipe'), descriptors('memfd')) == before


@pytest.mark.parametrize(('workers', 'killed', 'taken', 'then'), [
    (1, [0], 0, next),      # before its first task
    (2, [1], 1, lambda iterator: stream(iterator, 100)),
    (2, [0, 1], 1, lambda iterator: stream(iterator, 100)),
    (2, [0], 1, lambda iterator: iterator.reset()),
])
def test_killed_workers_are_named_and_the_others_ended(
        tmp_path, workers, killed, taken, then):
    iterator = ImageFolder(make_folder(tmp_path), crop()).iterator(
        4, workers, prefetch=4)
    stream(iterator, taken)
    pids = iterator.worker_pids
    assert sum(map(is_alive, pids)) == workers
    for worker in killed:
        os.kill(pids[worker], signal.SIGKILL)
    assert eventually(lambda: not any(
        is_alive(pids[worker]) for worker in killed))
    with pytest.raises(RuntimeError, match='.*'.join(
            rf'worker {worker} \(process {pids[worker]}\).*SIGKILL'
            for worker in killed)):
        then(iterator)
    assert not any(map(is_alive, pids))
    assert iterator.worker_pids == []


def data_bytes(pid):
    """What a process has asked the system for, to write into.

    How much of it is resident depends on the kernel.
    """
    with open(f'/proc/{pid}/status') as lines:
        (line,) = [line for line in lines if line.startswith('VmData:')]
    return int(line.split()[1]) * 1024


def growth(sizes):
    """Bytes per round: the median of the slopes between all pairs.

    An allocator's few large steps do not move it (Theil, Sen); a leak does.
    """
    return statistics.median(
        (sizes[later] - sizes[earlier]) / (later - earlier)
        for later in range(len(sizes)) for earlier in range(later))


@pytest.mark.parametrize('workers', [0, 2])
def test_a_rank_and_its_workers_do_not_grow(tmp_path, workers):
    data = ImageFolder(make_folder(tmp_path, 60, size=(120, 160)), crop(64),
                       cache='decoded')
    iterator = data.iterator(10, workers, 2)
    pids = (os.getpid(), *iterator.worker_pids)
    sizes = []
    for _ in range(24):
        stream(iterator, 12)
        sizes.append([data_bytes(pid) for pid in pids])
    iterator.finalize()
    # In each round 120 images of 12 KB, and as many decoded ones of 58 KB,
    # go through.  A hundredth of the smaller would be 14 KB.
    for process in zip(*sizes, strict=True):
        assert growth(process) < 14_000


def test_a_loop_of_iterators_opens_no_more_and_more_files(tmp_path):
    data = ImageFolder(make_folder(tmp_path), crop())

    def one():
        iterator = data.iterator(6, 1, 1)
        next(iterator)
        iterator.finalize()
        return len(os.listdir('/proc/self/fd'))
    assert one() == [one() for _ in range(2)][-1]


# --- whatever is killed, no process and no memory is left

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
        self.job = start_script(ranks if ranks > 1 else 0, '-c', RANK, root,
                                what, stdin=subprocess.PIPE)
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
    with start_script(0, '-c', CHILD, make_folder(tmp_path),
                      stderr=None) as rank:
        child, *workers = map(int, rank.stdout.readline().split())
        try:
            rank.kill()
            assert eventually(lambda: not any(map(is_alive, workers)))
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
