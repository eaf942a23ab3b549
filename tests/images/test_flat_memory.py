"""Many epochs take no more memory than a few."""
import os
import statistics

from chainer_fp8pipe.images import ImageFolder

import pytest

from .folders import crop, make_folder

ROUNDS, BATCHES = 24, 12


def data_bytes(pid):
    """What a process has asked the system for, to write into.

    How much of it is resident depends on the kernel: on pages that it shares,
    compresses, makes huge, or has taken back.  What was asked for does not.
    """
    with open(f'/proc/{pid}/status') as lines:
        (line,) = [line for line in lines if line.startswith('VmData:')]
    return int(line.split()[1]) * 1024


def growth(sizes):
    """Bytes per round: the median of the slopes between all pairs.

    An allocator takes what it needs in steps.  A few of them, wherever they
    are, do not move the median (Theil, Sen); a leak does, however it is
    rounded.
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
    for _ in range(ROUNDS):
        for _ in range(BATCHES):
            next(iterator)
        sizes.append([data_bytes(pid) for pid in pids])
    iterator.finalize()
    # In each round 120 images of 12 KB, and as many decoded ones of 58 KB,
    # go through.  A hundredth of the smaller would be 14 KB.
    for process in zip(*sizes, strict=True):
        assert growth(process) < 14_000
