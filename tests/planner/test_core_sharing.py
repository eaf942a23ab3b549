"""What ranks lose to each other, by clocks that no load disturbs."""
import os
from collections import deque
from types import SimpleNamespace

from chainer_fp8pipe.planner import core_sharing
from chainer_fp8pipe.planner.core_sharing import CoreSharing

import chainer
import pytest

from tests.ranks import on_ranks


class Machine:
    """A clock on the wall and one of the processor, which work moves on.

    Args:
        patch: Pytest's, by which ranks look at these clocks.
    """

    def __init__(self, patch):
        self.wall = self.processor = 0.0
        patch.setattr(core_sharing, 'time', SimpleNamespace(
            perf_counter=lambda: self.wall))
        patch.setattr(core_sharing, 'clock_of',
                      lambda device: lambda: self.processor)

    def takes(self, wall, processor):
        self.wall += wall
        self.processor += processor


def visited(comm, *visits):
    """What is found if passes take so long on this rank.

    Args:
        comm: The ranks, which are in one pool.
        visits: For each one the passes of the first rank alone, and those
            of this rank beside the others: (seconds, of the processor).
    """
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        passes = deque([(1.0, 1.0)])        # gets memory, and imports
        found = CoreSharing(comm, chainer.get_device('@numpy'),
                            lambda: machine.takes(*passes.popleft()))
        for alone, together in visits:
            passes += alone * (comm.rank == 0) + together
            found.visit()
            assert not passes
    return found


#: Passes of a visit in which each takes no longer than 40 ms.
MOST = core_sharing._MOST


@on_ranks(4)
def test_ranks_on_one_core_take_turns(comm):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        # Half a second is over after 4 passes of 0.16 s.
        found = visited(comm, ([(.04, .04)] * MOST, [(.16, .04)] * 4))
    finally:
        os.sched_setaffinity(0, before)
    cores = found.cores
    assert cores.pools == (0, 0, 0, 0)
    assert cores.single == 1
    assert cores.full == (pytest.approx(4),)
    assert len(set(comm.allgather((cores, found.straggling,
                                   found.drift)))) == 1
    # Four ranks on a core are not crowded by memory, if they do nothing.
    assert found.crowding == pytest.approx(1)


@on_ranks(2)
def test_processor_time_that_others_memory_costs_is_crowding(comm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_sharing, 'own_cores', lambda: {('machine', 0),
                                                       ('machine', 1)})
        found = visited(comm, ([(.03, .03)] * MOST, [(.036, .036)] * MOST))
    assert found.cores.full == (pytest.approx(1.2),)
    assert found.crowding == pytest.approx(1.2)


@on_ranks(2)
def test_the_last_rank_of_a_pass_is_later_than_the_mean(comm):
    late = [(.01, .01), (.04, .01)]
    found = visited(comm, ([(.01, .01)] * MOST,
                           late[::1 - 2 * comm.rank] * (MOST // 2)))
    # One of both is late in each pass.
    assert found.straggling == pytest.approx(.04 / .025)
    assert found.speeds == (1, 1)


@on_ranks(2)
def test_a_slow_rank_is_no_straggler(comm):
    seconds = .004 * (1 + 9 * comm.rank)
    found = visited(comm, ([(.004, .004)] * MOST,
                           [(seconds, seconds)] * MOST))
    assert found.speeds == (1, pytest.approx(10))
    # With the times as they are it would be 1.8.
    assert found.straggling == pytest.approx(1)


@on_ranks(1)
def test_later_visits_tell_how_the_pace_has_changed(comm):
    first, later = [(.005, .005)] * MOST, [(.02, .02)] * MOST
    assert visited(comm, (first, first)).drift == 1
    found = visited(comm, (first, first), *[(later, later)] * 4)
    assert found.drift == pytest.approx(4)


@on_ranks(1)
def test_one_rank_is_crowded_by_nobody(comm):
    found = visited(comm, ([(.01, .01)] * MOST, [(.01, .01)] * MOST))
    assert found.straggling == 1
    assert found.speeds == (1,)
    assert found.crowding == pytest.approx(1)


@on_ranks(2)
def test_work_that_fails_fails_on_all_ranks(comm):
    def work():
        if comm.rank == 1:
            raise ValueError('no')
    with pytest.raises(RuntimeError, match='ValueError: no'):
        CoreSharing(comm, chainer.get_device('@numpy'), work).visit()
