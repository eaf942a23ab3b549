"""Three epochs take no more memory than one."""
import os

from chainer_fp8pipe.images import ImageFolder

import pytest

from .folders import crop, make_folder


def private_bytes(pid):
    """What belongs to a process alone."""
    with open(f'/proc/{pid}/smaps_rollup') as lines:
        return sum(int(line.split()[1]) for line in lines
                   if line.startswith('Private')) * 1024


@pytest.mark.parametrize('workers', [0, 2])
def test_a_rank_and_its_workers_do_not_grow(tmp_path, workers):
    data = ImageFolder(make_folder(tmp_path, 60, size=(120, 160)), crop(64),
                       cache='decoded')
    iterator = data.iterator(10, workers, 2)

    def epochs(count):
        for _ in range(count * iterator.batches_per_epoch):
            next(iterator)
        return [private_bytes(pid)
                for pid in (os.getpid(), *iterator.worker_pids)]
    first = epochs(3)       # what is allocated once
    later = epochs(10)
    iterator.finalize()
    # 600 images of 12 KB, and as many decoded ones of 58 KB, went through.
    for before, after in zip(first, later, strict=True):
        assert after - before < 1 << 20
