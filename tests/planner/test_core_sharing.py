"""What ranks lose to each other, as it is measured."""
import time

from chainer_fp8pipe.planner.core_sharing import CoreSharing

import chainer
import pytest

from tests.ranks import on_ranks


def busy(seconds=.05):
    """Takes so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def shared(comm, work=busy, visits=1):
    found = CoreSharing(comm, chainer.get_device('@numpy'), work)
    for _ in range(visits):
        found.visit()
    return found


@on_ranks(4)
def test_ranks_on_one_core_take_turns(comm):
    import os
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        found = shared(comm)
    finally:
        os.sched_setaffinity(0, before)
    cores = found.cores
    assert cores.pools == (0, 0, 0, 0)
    assert len(set(comm.allgather((cores, found.straggling,
                                   found.drift)))) == 1
    # Alone it would be 1; other programs may want the cores as well.
    assert cores.full[0] > 1.5
    assert cores.full[0] > cores.single
    # Four ranks on a core are not crowded by memory, if they do nothing.
    assert found.crowding < cores.full[0]


@on_ranks(2)
def test_the_last_rank_of_a_pass_is_later_than_the_mean(comm):
    import random
    generator = random.Random(comm.rank)
    found = shared(comm, lambda: time.sleep(generator.choice([.01, .05])), 3)
    # One of both is late in half of all passes, by 0.05 / 0.03.
    assert 1.0 < found.straggling < 5 / 3 + .2


@on_ranks(2)
def test_a_slow_rank_is_no_straggler(comm):
    found = shared(comm, lambda: busy(.01 * (1 + 9 * comm.rank)))
    slow = found.speeds
    assert slow[0] == 1.0
    assert 5.0 < slow[1] < 15.0
    # With the times as they are it would be 1.8.
    assert found.straggling < 1.6


@on_ranks(1)
def test_later_visits_tell_how_the_pace_has_changed(comm):
    seconds = [.005]
    found = shared(comm, lambda: busy(seconds[0]))
    assert found.drift == 1.0
    seconds[0] = .02
    for _ in range(4):
        found.visit()
    assert found.drift > 1.5


@on_ranks(1)
def test_one_rank_is_crowded_by_nobody(comm):
    found = shared(comm, lambda: busy(.01))
    assert found.straggling == 1.0
    assert found.speeds == (1.0,)
    assert found.crowding >= 1.0


@on_ranks(2)
def test_work_that_fails_fails_on_all_ranks(comm):
    def work():
        if comm.rank == 1:
            raise ValueError('no')
    with pytest.raises(RuntimeError, match='ValueError: no'):
        shared(comm, work)
