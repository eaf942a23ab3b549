"""What ranks lose to each other, as it is measured."""
import time

from chainer_fp8pipe.chains.profiling.core_sharing import (
    measure_cores,
    pools_of,
)

import chainer
import pytest

from tests.ranks import on_ranks


@pytest.mark.parametrize(('cores', 'pools'), [
    ([{0}, {1}, {0}, {1}], [0, 1, 0, 1]),
    ([{0, 1}, {0, 1}], [0, 0]),
    ([{2}, {1}, {0}], [0, 1, 2]),
    # The last rank meets both.
    ([{0}, {1}, {0, 1}], [0, 0, 0]),
    ([{3}, {0}, {1}, {0, 1}], [0, 1, 1, 1]),
])
def test_ranks_with_a_core_in_common_are_in_a_pool(cores, pools):
    assert pools_of(cores) == pools


def busy(seconds=.05):
    """Takes so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@on_ranks(4)
def test_ranks_on_one_core_take_turns(comm):
    import os
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        cores = measure_cores(comm, chainer.get_device('@numpy'), busy)
    finally:
        os.sched_setaffinity(0, before)
    assert cores.pools == (0, 0, 0, 0)
    assert len(set(comm.allgather(cores))) == 1
    # Alone it would be 1; other programs may want the cores as well.
    assert cores.full[0] > 1.5
    assert cores.full[0] > cores.single


@on_ranks(2)
def test_work_that_fails_fails_on_all_ranks(comm):
    def work():
        if comm.rank == 1:
            raise ValueError('no')
    with pytest.raises(RuntimeError, match='ValueError: no'):
        measure_cores(comm, chainer.get_device('@numpy'), work)
