"""Ranks on common cores: as the simulator where nobody is disturbed."""
from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.engine import Engine
from chainer_fp8pipe.planning.schedules.simulator import (
    Costs,
    Link,
    add_pipeline,
    simulate,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCHEDULES = st.sampled_from(['gpipe', '1f1b', 'zero_bubble'])


def shared_step(schedule, costs, link, replicas, cores):
    """Seconds of a step of pipelines, whose ranks go stage by stage."""
    engine = Engine(Cluster.pairs(len(cores.pools), link.bandwidth,
                                  link.latency), cores)
    programs = [program for replica in range(replicas)
                for program in add_pipeline(
                    engine, schedule, costs, link.message_bytes,
                    ranks=range(replica, schedule.stages * replicas,
                                replicas))]
    engine.run()
    return max(program.ended for program in programs)


@given(SCHEDULES, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3),
       st.data())
def test_ranks_with_cores_of_their_own_are_as_fast_as_simulated(
        name, stages, parts, replicas, data):
    seconds = st.integers(0, 9).map(float)
    costs = [Costs(*(data.draw(seconds) for _ in range(4)))
             for _ in range(stages)]
    link = Link(data.draw(seconds), 1.0,
                [data.draw(seconds) for _ in range(stages - 1)])
    schedule = make_schedule(name, stages, parts)
    found = shared_step(schedule, costs, link, replicas, Cores(
        tuple(range(stages * replicas))))
    assert found == pytest.approx(
        simulate(schedule, costs, link).step_time)


def step(stages, replicas, parts, cores):
    costs = [Costs(1.0, 2.0, 0.0)] * stages
    link = Link(0.0, float('inf'), [0.0] * (stages - 1))
    return shared_step(make_schedule('1f1b', stages, parts), costs, link,
                       replicas, cores)


def test_ranks_on_one_core_share_it():
    one = Cores((0, 0, 0, 0), 1.0, (4.0,))
    assert step(1, 4, 1, one) == pytest.approx(4 * 3)
    # There is no bubble where a waiting rank leaves the core to others.
    assert step(4, 1, 4, one) == pytest.approx(4 * 4 * 3)


def test_a_pipeline_is_slower_alone_than_its_share():
    """Two cores for four ranks: replicas use both all the time."""
    two = Cores((0, 0, 0, 0), 1.0, (2.0,))
    assert step(1, 4, 1, two) == pytest.approx(2 * 3)
    assert 2 * 3 < step(4, 1, 4, two) / 4 < 4 * 3


def test_what_shares_a_core_matters():
    """Both first stages on one core: the other core is idle at first."""
    apart, together = (step(2, 2, 2, Cores(pools, 1.0, (2.0, 2.0)))
                       for pools in ((0, 1, 0, 1), (0, 0, 1, 1)))
    assert apart < together


def test_a_call_is_never_faster_than_alone():
    slow = Cores((0, 1), 1.5, (1.2, 1.0))
    assert step(1, 2, 1, slow) == pytest.approx(1.5 * 3)
