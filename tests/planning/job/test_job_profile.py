"""What was measured of a job, and the same job with other ranks."""
import dataclasses
import pickle

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.job_profile import Figure, NetworkFigures

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .jobs import figures, job

MODEL = figures(.01, .02)


@given(st.lists(st.floats(.001, 1e6), min_size=1, max_size=20))
def test_a_figure_is_the_median_with_half_the_distance_of_quartiles(values):
    low, median, high = numpy.percentile(values, [25, 50, 75])
    found = Figure.of(values)
    assert found.value == pytest.approx(median)
    assert found.spread == pytest.approx((high - low) / 2 / median)


def test_a_figure_of_nothing_has_no_spread():
    assert Figure.of([0.0, 0.0, 0.0]) == (0.0, 0.0)
    assert Figure.of(iter([-2.0, -4.0])) == (-3.0, pytest.approx(1 / 6))


def test_links_are_those_of_the_simulation():
    network = NetworkFigures(
        (0, 0, 1), Figure(1e-4, .1), Figure(1e9), Figure(2e9), 1000.0,
        Figure(1e-5), Figure(5e9), Figure(3e-6), Figure(1e-10))
    cluster = network.cluster()
    assert cluster.hosts == (0, 0, 1)
    assert [(hop.rate, hop.latency, hop.burst)
            for hop in cluster.route(0, 2)] == [
        (1e9, 1e-4, 1000.0), (2e9, 0.0, 0.0), (1e9, 0.0, 1000.0)]
    assert [(hop.rate, hop.latency) for hop in cluster.route(0, 1)] == [
        (5e9, 1e-5)]
    assert (cluster.message_cost, cluster.byte_cost) == (3e-6, 1e-10)
    assert network.between_hosts
    assert not NetworkFigures((0, 0)).between_hosts


def test_elements_are_those_of_known_shapes():
    assert figures(.01, .01, parameters=400).elements == 200
    model = figures(.01, .01, parameters=400)
    assert model.elements_of(['/1/W']) == 100
    model.parameters['/1/W'] = model.parameters['/1/W']._replace(shape=None)
    assert model.elements == 100


# --- other numbers of ranks --------------------------------------------------

def test_a_profile_for_as_many_ranks_is_the_same_job():
    profile = job(MODEL, (0, 1, 0, 1), Cores((0, 1, 0, 1), 1.1, (1.5, 1.7)),
                  speeds=(1.0, 1.2, 1.0, 0.9))
    assert profile.for_ranks(4) is profile


@pytest.mark.parametrize(('hosts', 'count', 'wanted'), [
    ((0, 0, 1, 1), 6, (0, 0, 1, 1, 2, 2)), ((0, 0, 1, 1), 2, (0, 0)),
    ((0, 0), 5, (0,) * 5), ((0, 1), 4, (0, 1, 2, 3)),
    ((0, 0, 0, 1), 6, (0, 0, 0, 1, 1, 1)), ((0,), 2, (0, 0))])
def test_hosts_go_on_as_they_began(hosts, count, wanted):
    assert job(MODEL, hosts).for_ranks(count).network.hosts == wanted


def test_more_ranks_on_the_same_cores_share_them():
    profile = job(MODEL, (0, 0), Cores((0, 0), 1.1, (1.5,)))
    four = profile.for_ranks(4).cores
    assert four.pools == (0,) * 4
    assert four.slowdown(0, 4) == 3.0
    # As before, for as many of them as there were.
    assert four.slowdown(0, 2) == 1.5
    # Fewer than there are cores for do not share them.
    assert profile.for_ranks(1).cores.slowdown(0, 1) == 1.1


def test_more_hosts_have_cores_of_their_own():
    profile = job(MODEL, (0, 0, 1, 1), Cores((0, 0, 1, 1), 1.1, (1.5, 1.7)))
    six = profile.for_ranks(6).cores
    assert six.pools == (0, 0, 1, 1, 2, 2)
    assert [six.slowdown(pool, 2) for pool in range(3)] == [
        pytest.approx(1.6)] * 3


def test_ranks_that_are_bound_to_cores_are_bound_to_as_many():
    profile = job(MODEL, (0, 0), Cores((0, 1), 1.1, (1.2, 1.2)))
    cores = profile.for_ranks(4).cores
    assert cores.pools == (0, 1, 0, 1)
    assert cores.slowdown(1, 2) == 2.4
    profile = job(MODEL, (0, 0, 1, 1), Cores((0, 1, 2, 3), 1.1, (1.2,) * 4))
    cores = profile.for_ranks(6).cores
    assert cores.pools == (0, 1, 2, 3, 4, 5)
    assert cores.slowdown(5, 1) == 1.2


def test_a_host_with_fewer_ranks_has_cores_for_them():
    profile = job(MODEL, (0, 0, 1, 1), Cores((0, 0, 1, 1), 1.1, (1.8, 1.8)))
    cores = profile.for_ranks(5).cores
    assert [cores.slowdown(pool, 1 + (pool < 2)) for pool in range(3)] == [
        1.8, 1.8, 1.1]


def test_speeds_are_of_the_ranks_that_were_measured():
    profile = job(MODEL, (0, 0), speeds=(1.0, 2.0))
    assert profile.for_ranks(4).speeds == ()
    assert profile.on(4, 1e9).speeds == ()


def test_a_rank_on_each_of_some_hosts_has_links_as_given():
    profile = job(MODEL, (0, 0, 0), Cores((0, 0, 0), 1.2, (3.0,)),
                  trunk=Figure(1e8), remarks=('slow',))
    found = profile.on(5, 2e9, 1e-3)
    assert found.ranks == 5
    assert found.network.hosts == (0, 1, 2, 3, 4)
    assert found.network.cluster().route(1, 4)[0].rate == 2e9
    assert found.network.cluster().route(1, 4)[0].latency == 1e-3
    assert found.network.trunk is None
    assert found.network.remarks == ()
    assert [found.cores.slowdown(pool, 1) for pool in range(5)] == [1.2] * 5


def test_a_profile_can_be_sent_to_other_ranks():
    profile = job(MODEL, (0, 1))
    again = pickle.loads(pickle.dumps(profile))
    assert (again.network, again.cores) == (profile.network, profile.cores)
    assert again.model.elements == profile.model.elements


def test_all_passes_of_a_slower_processor_take_as_much_longer():
    model = figures(.01, .02, update=Figure(.1, .2), step=Figure(.3),
                    micro_batch=Figure(.4))
    slower = model.slower(2.0, 3.0)
    assert slower.plain == tuple(2 * one for one in model.plain)
    assert slower.plain_few == tuple(2 * one for one in model.plain_few)
    for mine, before in ((slower.calls, model.calls),
                         (slower.calls_few, model.calls_few)):
        assert [(call.forward, call.backward) for call in mine] == [
            (2 * call.forward, 2 * call.backward) for call in before]
    assert slower.update == (pytest.approx(.3), .2)
    assert (slower.step.value, slower.micro_batch.value) == (.6, .8)
    assert slower.parameters is model.parameters


@given(st.integers(2, 64), st.integers(2, 4096), st.floats(1.0, 1.5))
def test_the_last_of_more_ranks_is_later(few, many, straggling):
    profile = dataclasses.replace(job(MODEL, range(few)),
                                  straggling=straggling)
    there = profile.for_ranks(many).straggling
    assert (there >= straggling) == (many >= few or straggling == 1.0)
    assert profile.for_ranks(many).for_ranks(few).straggling == (
        pytest.approx(straggling))
    assert profile.for_ranks(1).straggling == 1.0


def test_the_last_rank_is_as_late_as_the_largest_deviate():
    generator = numpy.random.default_rng(0)
    two, eight = (generator.normal(size=(10000, ranks)).max(axis=1).mean()
                  for ranks in (2, 8))
    found = dataclasses.replace(job(MODEL, range(2)), straggling=1.1
                                ).for_ranks(8)
    assert (found.straggling - 1) / .1 == pytest.approx(eight / two, rel=.06)
