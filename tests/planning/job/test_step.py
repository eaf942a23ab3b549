"""Predicted steps of made-up jobs take what arithmetic says."""
import dataclasses
import math

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.step import StepModel

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .jobs import SAMPLES, codecs, job, jobs
from .steps import BYTES, MODEL, PASSES, cut, seconds, step

some = settings(max_examples=max(settings.default.max_examples // 4, 1))


# --- replicas ----------------------------------------------------------------

@pytest.mark.parametrize('samples', [2, 4, 8, 24])
def test_one_rank_takes_its_passes_and_its_update(samples):
    found = step(job(MODEL), each=samples)
    assert found.parts == {
        'forward and backward': pytest.approx(PASSES * samples / SAMPLES),
        'exchange': 0.0, 'update': .02, 'other': .003}
    assert found.seconds.value == pytest.approx(sum(found.parts.values()))


@pytest.mark.parametrize('algorithm', ['direct', 'ring', 'torus2d'])
@pytest.mark.parametrize('codec', ['float32', 'float16', 'fp8'])
def test_without_wires_an_exchange_is_what_comes_beside(algorithm, codec):
    profile = job(MODEL, range(4), codec=codecs(update=.001, tensor=.0001))
    found = step(profile, codec=codec, algorithm=algorithm)
    assert found.parts['exchange'] == pytest.approx(.001 + 3 * .0001)


@pytest.mark.parametrize('algorithm', ['direct', 'ring'])
@pytest.mark.parametrize(('codec', 'size'), [
    ('float32', 4), ('float16', 2), ('fp8', 1)])
@pytest.mark.parametrize('ranks', [2, 3, 4])
def test_a_slow_wire_takes_the_bytes_of_an_all_reduce(
        algorithm, codec, size, ranks):
    """2 (P - 1) / P of the vector leaves each host.

    Directly, contributions and means; in a ring, sums of more bytes as well.
    """
    found = step(job(MODEL, range(ranks), rate=1e7), codec=codec,
                 algorithm=algorithm)
    elements = BYTES / 4
    sums = {'float32': 4, 'float16': 4, 'fp8': 2}[codec]
    first, others = (1, ranks - 2) if algorithm == 'ring' else (ranks - 1, 0)
    sent = first * size + others * sums + (ranks - 1) * size
    assert found.parts['exchange'] == pytest.approx(
        sent * elements / ranks / 1e7, rel=.03)


def test_the_spread_is_of_what_takes_long():
    links = {'local_rate': Figure(1e7, .3), 'local_latency': Figure(0.0)}
    model = dataclasses.replace(MODEL, spread=.05)
    slow = step(job(model, (0, 0), **links)).seconds
    links['local_rate'] = Figure(1e12, .3)
    fast = step(job(model, (0, 0), **links)).seconds
    assert fast.spread == pytest.approx(.05 * .4 / .423, rel=.01)
    assert .2 < slow.spread < .3


def test_a_slow_rank_is_waited_for():
    profile = job(MODEL, range(3), speeds=(1.0, 1.5, 1.0))
    assert seconds(profile) == pytest.approx(1.5 * .423)


def test_the_last_rank_of_each_pass_is_waited_for():
    profile = dataclasses.replace(job(MODEL, range(3)), straggling=1.2)
    assert seconds(profile) == pytest.approx(1.2 * .423)
    assert seconds(profile, overlap=True) == pytest.approx(1.2 * .423)


@pytest.mark.parametrize('overlap', [False, True, 'next_forward'])
def test_twice_the_ranks_on_as_many_cores_take_twice_as_long(overlap):
    two = job(MODEL, (0, 0), Cores((0, 0), 1.0, (1.0,)))
    four = two.for_ranks(4)
    assert seconds(four, overlap=overlap) == pytest.approx(
        2 * seconds(two, overlap=overlap))


def test_a_configuration_for_other_ranks_is_an_error():
    with pytest.raises(ValueError, match='is for 3 ranks, the profile for 2'):
        step(job(MODEL, range(2)), replicas=3)


# --- of any job --------------------------------------------------------------

def ways(profile, batch, draw):
    """A configuration for these ranks, or None."""
    stages = draw(st.sampled_from([
        number for number in range(1, profile.ranks + 1)
        if profile.ranks % number == 0]))
    replicas = profile.ranks // stages
    way = Configuration(
        replicas, codec=draw(st.sampled_from(['fp8', 'float16', 'float32'])),
        algorithm=draw(st.sampled_from(['direct', 'ring', 'torus2d'])))
    if stages == 1:
        return dataclasses.replace(way, overlap=draw(st.sampled_from(
            [False, True, 'next_forward'])))
    try:
        plain = cut(profile, stages, stages * draw(st.sampled_from([1, 2])),
                    draw(st.sampled_from(['gpipe', '1f1b', 'zero_bubble',
                                          'interleaved'])), batch)
    except ValueError:              # fewer calls than stages
        return None
    return dataclasses.replace(plain, codec=way.codec,
                               algorithm=way.algorithm)


@some
@given(jobs(), st.sampled_from([.5, .1, .01]), st.data())
def test_slower_links_make_no_step_faster(profile, factor, data):
    batch = SAMPLES * profile.ranks
    way = ways(profile, batch, data.draw)
    if way is None:
        return
    network = profile.network
    slower = dataclasses.replace(profile, network=dataclasses.replace(
        network, rate=Figure(network.rate.value * factor),
        local_rate=Figure(network.local_rate.value * factor),
        latency=Figure(network.latency.value / factor),
        local_latency=Figure(network.local_latency.value / factor)))
    before, after = (StepModel(one, batch).predict(way).seconds.value
                     for one in (profile, slower))
    assert after >= before * (1 - .01)


@some
@given(jobs(), st.data())
def test_no_step_takes_less_than_is_known_at_once(profile, data):
    """What a search leaves out by that is no loss."""
    batch = SAMPLES * profile.ranks
    way = ways(profile, batch, data.draw)
    if way is None:
        return
    model = StepModel(profile, batch)
    found = model.predict(way)
    # The first of two steps stands for those before it.
    assert model.least_seconds(way) <= found.seconds.value * (1 + 1e-5)
    assert all(part >= -1e-9 for part in found.parts.values())
    assert math.isfinite(found.seconds.value)
    if way.cut is not None:
        assert model.pipelines.least_of_passes(
            way.stages, way.replicas, way.micro_batches, way.cut.chunks
        ) <= model.pipelines.seconds_of_passes(way) * (1 + 1e-9)
