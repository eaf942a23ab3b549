"""Bytes of ranks, added up by hand."""
import dataclasses

from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.exchange_memory import exchange_bytes
from chainer_fp8pipe.planning.job.exchanges import plans_of
from chainer_fp8pipe.planning.job.model_costs import ModelCosts
from chainer_fp8pipe.planning.job.rank_memory import MemoryModel

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .jobs import SAMPLES, figures, job, jobs

some = settings(max_examples=max(settings.default.max_examples // 4, 1))

#: Four layers of 1,000 parameters, each of which keeps 8,000 bytes of eight
#: samples.
MODEL = figures(*[.01] * 4, parameters=4000, kept=8000, size=1600,
                optimizer_arrays=2)


def of(profile, way, batch):
    return MemoryModel(profile, ModelCosts(profile.model)).bytes_of(
        way, batch)


def exchange(codec, elements, replicas, algorithm='direct'):
    return exchange_bytes(codec, elements, plans_of(
        algorithm, (), tuple(range(replicas))))


@pytest.mark.parametrize('samples', [2, 8, 16])
def test_a_rank_keeps_parameters_and_what_each_sample_leaves(samples):
    """Values, gradients and two arrays of the optimizer."""
    profile = job(MODEL, overhead=500.0)
    assert of(profile, Configuration(), samples) == (
        500 + 4 * 4 * 4000 + 4 * 1000 * samples,)


@pytest.mark.parametrize(('place', 'beyond'), [(0, 5000), (1, 1000), (2, 0)])
def test_temporary_arrays_count_beyond_gradients_that_come_later(place,
                                                                 beyond):
    """The first call's gradient is the last one of four, of 4,000 bytes."""
    calls = tuple(dataclasses.replace(
        call, temporary=9000 if number == place else 0)
        for number, call in enumerate(MODEL.calls))
    model = dataclasses.replace(MODEL, calls=calls, few=SAMPLES,
                                calls_few=calls, plain_few=MODEL.plain)
    assert of(job(model), Configuration(), SAMPLES) == (
        4 * 4 * 4000 + 4 * 8000 + beyond,)


@pytest.mark.parametrize('codec', ['fp8', 'float16', 'float32'])
@pytest.mark.parametrize('algorithm', ['direct', 'ring'])
def test_replicas_keep_what_their_communicator_does(codec, algorithm):
    profile = job(MODEL, range(4))
    found, = of(profile, Configuration(
        4, codec=codec, algorithm=algorithm), 4 * SAMPLES)
    alone, = of(job(MODEL), Configuration(), SAMPLES)
    assert found == alone + exchange(codec, 4000, 4, algorithm)


def test_more_replicas_have_fewer_samples_each():
    two, four = (of(job(MODEL, range(ranks)), Configuration(
        ranks), 16)[0] - exchange('float32', 4000, ranks)
        for ranks in (2, 4))
    assert two - four == 4 * 1000 * (8 - 4)


def cut(profile, stages, micro_batches, schedule, batch, **wanted):
    found, _ = Choices(profile, Wanted(batch, **wanted)).cut(
        stages, profile.ranks // stages, micro_batches, schedule)
    return Configuration(profile.ranks // stages, stages, micro_batches,
                         found)


@pytest.mark.parametrize(('schedule', 'live'), [
    ('gpipe', (4, 4)), ('1f1b', (2, 1))])
def test_stages_keep_as_many_micro_batches_as_are_live(schedule, live):
    """Each micro-batch has two of eight samples."""
    profile = job(MODEL, (0, 0))
    found = of(profile, cut(profile, 2, 4, schedule, SAMPLES), SAMPLES)
    crossing = 1600 * 2 / SAMPLES
    for stage, bytes_ in enumerate(found):
        # What comes in is kept for each of these; a buffer at each end.
        assert bytes_ == pytest.approx(
            2 * 4 * 4000 + live[stage] * 2 * 2000
            + stage * live[stage] * crossing + 2 * crossing)


def test_stages_of_replicas_keep_what_their_communicators_do():
    alone = job(MODEL, (0, 0))
    both = job(MODEL, (0, 0, 1, 1))
    way = cut(both, 2, 4, '1f1b', 2 * SAMPLES)
    assert of(both, way, 2 * SAMPLES) == tuple(
        bytes_ + exchange('float32', 2000, 2) for bytes_ in of(
            alone, dataclasses.replace(way, replicas=1), SAMPLES))


def test_a_stage_that_runs_forward_twice_keeps_one_micro_batch():
    profile = job(MODEL, (0, 0))
    plain = cut(profile, 2, 4, '1f1b', SAMPLES)
    first, last = of(profile, plain, SAMPLES)
    again = dataclasses.replace(plain, cut=dataclasses.replace(
        plain.cut, recompute=(True, False)))
    assert of(profile, again, SAMPLES) == (
        pytest.approx(first - 2 * 2000), last)


def test_least_bytes_of_an_exchange_are_those_of_the_smallest_codec():
    profile = job(MODEL, range(4))
    model = MemoryModel(profile, ModelCosts(MODEL))
    # Of two replicas, each rank has a half of the parameters.
    assert model.least_exchange(('float32', 'float16'), 2) == min(
        exchange(codec, 2000, 2) for codec in ('float32', 'float16'))


@some
@given(jobs(), st.integers(1, 8))
def test_more_samples_never_take_less(profile, samples):
    way = Configuration(profile.ranks)
    fewer, more = (of(profile, way, count * profile.ranks)
                   for count in (samples, samples + 1))
    assert fewer <= more


def test_temporary_arrays_of_an_update_count_where_they_are_more():
    """Of the largest parameter, when nothing of the passes is left."""
    profile = job(dataclasses.replace(MODEL, update_temporary=30.0), (0, 0))
    fixed = 4 * 4 * 4000
    assert of(profile, Configuration(2), 4) == (
        fixed + 30 * 4000 + exchange('float32', 4000, 2),)
    assert of(profile, Configuration(2), 128) == (
        fixed + 4 * 64000 + exchange('float32', 4000, 2),)
    # The first updates are not made block by block.
    assert of(profile, Configuration(2, overlap='next_forward'), 4) == (
        fixed + 30 * 4000 + exchange('float32', 4000, 2),)
