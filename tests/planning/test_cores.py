"""Computations on shared cores end when closed forms and hand say."""
import itertools

from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.engine import Compute, Engine, Receive, Send

import pytest
from hypothesis import given
from hypothesis import strategies as st


def ends(seconds, cluster=None, cores=None):
    """When each rank's computations are through."""
    engine = Engine(cluster or Cluster.pairs(len(seconds), 1.0, 0.0), cores)
    programs = [engine.add(rank, map(Compute, mine))
                for rank, mine in enumerate(seconds)]
    engine.run()
    return [program.ended for program in programs]


def test_a_slowdown_is_between_that_of_one_and_that_of_all():
    slow = Cores((0, 1, 0, 0), 1.5, (6.0, 1.0))
    assert [slow.slowdown(0, busy) for busy in (1, 2, 3)] == [2, 4, 6]
    assert slow.slowdown(1, 1) == 1.5
    assert Cores((0, 0), 1.0, (3.0,)).slowdown(0, 2) == 3.0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_ranks_that_share_one_core_evenly_end_one_after_the_other(seconds):
    """While k ranks are left, all of them need k times as long."""
    count, now, before, wanted = len(seconds), 0.0, 0, {}
    for left, work in zip(range(count, 0, -1), sorted(seconds),
                          strict=True):
        now += left * (work - before)
        before, wanted[work] = work, now
    found = ends([[work] for work in seconds], cores=Cores(
        (0,) * count, 1.0, (float(count),)))
    assert found == pytest.approx([wanted[work] for work in seconds])


def test_a_rank_that_comes_later_makes_the_others_slower_from_then_on():
    """Alone until the message at 1 s; then both at half their speed."""
    engine = Engine(Cluster.pairs(3, 1.0, 0.0), Cores(
        (0, 0, 1), 1.0, (2.0, 1.0)))
    programs = [engine.add(0, [Compute(3.0)]),
                engine.add(1, [Receive('go'), Compute(1.0)]),
                engine.add(2, [Send(1, 1.0, 'go')])]
    engine.run()
    assert [program.ended for program in programs[:2]] == [4, 3]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4),
                min_size=2, max_size=5))
def test_one_core_in_turns_is_never_idle(seconds):
    """So the last rank ends after all work, whoever had the core when."""
    total = sum(map(sum, seconds))
    for time_slice in (0.0, 2.0, 100.0):
        cluster = Cluster(range(len(seconds)), 1.0, 0.0, cores=1,
                          sharing=len(seconds), time_slice=time_slice)
        assert max(ends(seconds, cluster)) == total


@pytest.mark.parametrize(('time_slice', 'wanted'), [
    (0.0, [4, 2]), (1.5, [4, 3]), (100.0, [3, 4])])
def test_turns_are_as_long_as_the_time_slice(time_slice, wanted):
    """Ranks have the core in the order 0 1 0 0, or 0 0 1 0, or 0 0 0 1.

    A computation is not interrupted: after 1 s of a slice of 1.5 s rank 0
    begins another one of 1 s.
    """
    cluster = Cluster(range(2), 1.0, 0.0, cores=1, sharing=2,
                      time_slice=time_slice)
    assert ends([[1.0, 1.0, 1.0], [1.0]], cluster) == wanted


def test_groups_of_ranks_have_cores_of_their_own():
    cluster = Cluster(range(4), 1.0, 0.0, cores=1, sharing=2)
    assert ends([[1.0]] * 4, cluster) == [1, 2, 1, 2]
    assert ends([[1.0]] * 4, Cluster(range(4), 1.0, 0.0, cores=2, sharing=4)
                ) == [1, 1, 2, 2]


def test_cores_for_all_are_never_waited_for():
    seconds = [[2.0, 1.0], [1.0, 3.0], [4.0]]
    cluster = Cluster(range(3), 1.0, 0.0, cores=3, sharing=3)
    assert ends(seconds, cluster) == [3, 4, 4] == [
        list(itertools.accumulate(mine))[-1] for mine in seconds]
