"""Predicted steps of made-up jobs take what arithmetic says."""
import dataclasses
import math

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.step import StepModel

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .jobs import SAMPLES, codecs, figures, job, jobs

some = settings(max_examples=max(settings.default.max_examples // 4, 1))

#: Seconds of forward and backward of eight samples, in four layers.
PASSES = .4
MODEL = figures(*[PASSES / 4] * 4, parameters=4_000_000,
                update=Figure(.02), rest=Figure(.003))
BYTES = 4 * 4_000_000


def step(profile, each=SAMPLES, **way):
    """A step of so many samples for each rank."""
    way = {'replicas': profile.ranks, **way}
    return StepModel(profile, each * profile.ranks).predict(
        Configuration(**way))


def seconds(profile, **way):
    return step(profile, **way).seconds.value


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


# --- overlap -----------------------------------------------------------------

@some
@given(st.integers(1, 4), st.sampled_from([1e6, 1e7, 1e8, 1e9]),
       st.lists(st.integers(1, 20), min_size=1, max_size=8),
       st.integers(1, 8), st.sampled_from([True, 'next_forward']),
       st.sampled_from(['float32', 'fp8']), st.sampled_from([
           'direct', 'ring']))
def test_overlap_is_no_slower_than_one_after_the_other_and_hides_no_more_than_there_is(  # noqa: E501
        ranks, rate, layers, buckets, overlap, codec, algorithm):
    """Links without latency: each bucket takes its share of an exchange."""
    model = figures(*(layer * 1e-3 for layer in layers), buckets=buckets,
                    parameters=400_000, update=Figure(.005))
    profile = job(model, range(ranks), rate=rate)
    way = {'codec': codec, 'algorithm': algorithm}
    plain = step(profile, **way)
    found = seconds(profile, overlap=overlap, **way)
    wire = plain.parts['exchange']
    compute = plain.seconds.value - wire
    assert found >= max(compute, .98 * wire) * (1 - 1e-9)
    # Buckets begin and end one by one, each with a frame that waits.
    assert found <= 1.05 * plain.seconds.value + 1e-9


def test_a_wire_that_is_never_idle_is_what_a_step_takes():
    """Waiting in the next forward pass: only the first bucket's is seen."""
    model = figures(*[.01] * 20, parameters=4_000_000)
    profile = job(model, range(2), rate=2e8)
    wire = 20 * 4_000_000 / 2e8         # half of the vector twice
    assert wire == pytest.approx(.4)
    found = seconds(profile, overlap='next_forward')
    # The next pass needs the first layer's, and then the others as they come.
    assert wire < found < wire + 2 * .01 + .05 * wire
    assert found < seconds(profile, overlap=True) < wire + .2


def test_buckets_of_unequal_sizes_are_all_waited_for():
    """The last one to leave has one frame, the first one hundreds."""
    model = figures(*[.01] * 4, parameters=4_000_000)
    model.parameters['/0/W'] = model.parameters['/0/W']._replace(shape=(9,))
    profile = job(model, range(2), rate=1e7)
    for overlap in True, 'next_forward':
        assert seconds(profile, overlap=overlap) == pytest.approx(
            3 * 4_000_000 / 1e7, rel=.05)


def test_a_core_encodes_and_computes_in_turn():
    """A rank and its thread share a core: nothing is hidden of encoding."""
    profile = job(MODEL, range(2), codec=codecs(rate=2e8))
    plain = step(profile, codec='fp8')
    assert plain.parts['exchange'] > .01
    assert seconds(profile, codec='fp8', overlap=True) == pytest.approx(
        plain.seconds.value, rel=.02)
    # With a core for the thread, all but the last bucket's is hidden.
    apart = job(MODEL, (0, 0), Cores((0, 0), 1.0, (.5,)),
                codec=codecs(rate=2e8))
    assert seconds(apart, codec='fp8', overlap=True) < (
        plain.seconds.value - .6 * plain.parts['exchange'])


# --- pipelines ---------------------------------------------------------------

def cut(profile, stages, micro_batches, schedule, batch):
    found, _ = Choices(profile, Wanted(batch)).cut(
        stages, profile.ranks // stages, micro_batches, schedule)
    return Configuration(profile.ranks // stages, stages, micro_batches,
                         found)


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
@pytest.mark.parametrize(('stages', 'micro_batches'), [
    (2, 2), (2, 8), (4, 4), (4, 8)])
def test_equal_stages_take_the_formula_of_pipelines(
        schedule, stages, micro_batches):
    """(m + d - 1) / m of the time of a stage (the paper's equation 2)."""
    model = figures(*[10.0] * 4, parameters=400)
    profile = job(model, (0,) * stages, Cores(tuple(range(stages))))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, stages, micro_batches, schedule, SAMPLES))
    whole = 40.0
    assert found.seconds.value == pytest.approx(
        (micro_batches + stages - 1) / micro_batches * whole / stages,
        rel=1e-3)
    assert found.parts['forward and backward'] == pytest.approx(
        whole / stages, rel=1e-3)
    assert found.parts['exchange'] == 0


def test_each_part_beside_the_calls_counts_once_for_what_it_is():
    model = figures(*[10.0] * 4, update=Figure(.4), rest=Figure(.01),
                    step=Figure(.02), micro_batch=Figure(.05),
                    ghost=Figure(.01))
    profile = job(model, (0, 0))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    # A stage passes by the two calls of the other one.
    assert found.parts['forward and backward'] == pytest.approx(
        20 + 4 * (.05 + 2 * .01), rel=1e-3)
    assert found.parts['update'] == pytest.approx(.2)
    assert found.parts['other'] == pytest.approx(.03)


def test_stages_of_late_ranks_take_longer():
    profile = job(figures(*[10.0] * 4), (0, 0))
    way = cut(profile, 2, 4, '1f1b', SAMPLES)
    late = StepModel(dataclasses.replace(profile, straggling=1.1), SAMPLES)
    assert late.predict(way).seconds.value == pytest.approx(
        1.1 * StepModel(profile, SAMPLES).predict(way).seconds.value)


def test_chunks_of_a_rank_pay_for_a_micro_batch_once():
    model = figures(*[10.0] * 4, micro_batch=Figure(.5))
    profile = job(model, (0, 0))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, 'interleaved', SAMPLES))
    assert found.parts['forward and backward'] == pytest.approx(
        20 + 4 * .5, rel=1e-3)


def test_stages_with_few_parameters_leave_the_core_to_the_others():
    model = figures(*[10.0] * 3, parameters=400, update=Figure(.3))
    profile = job(model, (0, 0), Cores((0, 0), 1.0, (2.0,)))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    assert found.parts['update'] == pytest.approx(.3)
    apart = job(model, (0, 1))
    assert StepModel(apart, SAMPLES).predict(
        cut(apart, 2, 4, '1f1b', SAMPLES)).parts['update'] == (
            pytest.approx(.2))


@pytest.mark.parametrize(('hosts', 'seconds'), [
    ((0, 1), .8), ((0, 1, 2), .8 * 17 / 16), ((0, 0, 1), .8)])
def test_a_batch_is_handed_on_from_stage_to_stage(hosts, seconds):
    model = figures(*[10.0] * 3, sample_bytes=1e6)
    profile = job(model, hosts, rate=1e7, local_rate=Figure(math.inf))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, len(hosts), 4, '1f1b', SAMPLES))
    assert found.parts['other'] == pytest.approx(seconds)


def test_replicas_of_a_pipeline_average_what_each_stage_has():
    model = figures(*[.01] * 4, parameters=4_000_000)
    profile = job(model, (0, 0, 1, 1), rate=1e7,
                  local_rate=Figure(math.inf), codec=codecs(update=.003))
    way = cut(profile, 2, 4, '1f1b', 32)
    found = StepModel(profile, 32).predict(way)
    # Two stages of a host send half of the vector each, through one port.
    assert found.parts['exchange'] == pytest.approx(
        4 * 4_000_000 / 1e7 + .003, rel=.05)


def test_stages_on_one_core_leave_no_bubble():
    model = figures(*[10.0] * 4)
    profile = job(model, (0, 0), Cores((0, 0), 1.0, (2.0,)))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    assert found.seconds.value == pytest.approx(40.0, rel=1e-3)


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
        assert model.least_of_passes(
            way.stages, way.replicas, way.micro_batches, way.cut.chunks
        ) <= model.seconds_of_passes(way) * (1 + 1e-9)
