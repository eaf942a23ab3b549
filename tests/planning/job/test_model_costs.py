"""Seconds and bytes of a model: a line through the two sizes measured."""
import dataclasses

from chainer_fp8pipe.planning.job.model_costs import ModelCosts
from chainer_fp8pipe.planning.partition.calls import Parameter
from chainer_fp8pipe.planning.partition.intervals import Intervals

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .jobs import FEW, SAMPLES, figures

SUMS = 'forward', 'backward', 'weights'
TABLES = 'kept', 'deferred', 'temporary', 'crossing'


def same(one, other):
    return {name: pytest.approx(getattr(other, name), rel=1e-6)
            for name in (*SUMS, *TABLES, 'parameters')} == {
        name: getattr(one, name) for name in (*SUMS, *TABLES, 'parameters')}


def with_fixed(model, seconds, nbytes):
    """Each call takes so long, and keeps so much, for no sample at all."""
    def fixed(calls):
        return tuple(dataclasses.replace(
            call, forward=call.forward + seconds,
            backward=call.backward + seconds, kept=call.kept + nbytes)
            for call in calls)
    return dataclasses.replace(
        model, calls=fixed(model.calls), calls_few=fixed(model.calls_few))


@pytest.mark.parametrize('samples', [SAMPLES, FEW])
def test_at_both_sizes_all_is_as_measured(samples):
    model = with_fixed(figures(.01, .03, .02, kept=800, size=1600), 1e-3, 100)
    calls = model.calls if samples == SAMPLES else model.calls_few
    assert same(ModelCosts(model).intervals(samples), Intervals(
        calls, model.order, model.parameters))


@pytest.mark.parametrize('samples', [1, 3, 5, 16, 2.5])
def test_in_between_and_beyond_all_grows_along_a_line(samples):
    model = with_fixed(figures(.01, .03, .02, kept=800, size=1600), 1e-3, 100)
    found = ModelCosts(model).intervals(samples)
    assert found.forward == pytest.approx(
        numpy.array([0, .005, .02, .03]) * samples / SAMPLES
        + 1e-3 * numpy.arange(4))
    assert found.kept[0, 3] == pytest.approx(
        3 * (100 * samples + 100))
    assert found.crossing[1] == pytest.approx(1600 * samples / SAMPLES)
    # Parameters are the same for any batch.
    assert found.parameters[0, 3] == 3000


@pytest.mark.parametrize('samples', [1, 4, 32])
def test_of_one_size_all_grows_with_the_samples(samples):
    model = figures(.01, .03, kept=800)
    model = dataclasses.replace(model, few=SAMPLES, calls_few=model.calls,
                                plain_few=model.plain)
    costs = ModelCosts(model)
    assert costs.intervals(samples).forward[-1] == pytest.approx(
        .02 * samples / SAMPLES)
    assert costs.plain(samples).seconds == pytest.approx(
        .04 * samples / SAMPLES)


SECONDS = st.integers(0, 20).map(lambda number: number * 1e-3)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS,
                          st.integers(0, 5000), st.integers(0, 5000)),
                min_size=1, max_size=6), st.floats(.25, 64))
def test_nothing_is_negative(noise, samples):
    """Noise may make the smaller batch take longer than the larger one."""
    model = figures(*[.01] * len(noise))
    model = dataclasses.replace(
        model, calls=tuple(
            dataclasses.replace(call, forward=forward, backward=backward,
                                deferrable=.5, kept=kept)
            for call, (forward, backward, _, _, kept, _) in zip(
                model.calls, noise, strict=True)),
        calls_few=tuple(
            dataclasses.replace(call, forward=forward, backward=backward,
                                deferrable=.5, kept=kept)
            for call, (_, _, forward, backward, _, kept) in zip(
                model.calls_few, noise, strict=True)))
    found = ModelCosts(model).intervals(samples)
    for name in SUMS:
        assert (numpy.diff(getattr(found, name)) >= 0).all(), name
    for name in TABLES:
        assert (getattr(found, name) >= 0).all(), name
    # The gradients of weights alone are a part of the backward pass.
    assert (numpy.diff(found.weights) <= numpy.diff(found.backward)
            + 1e-9).all()


def test_calls_that_are_joined_are_the_same_ones_with_both_sizes():
    """There are more than a search can take one by one."""
    noise = numpy.random.default_rng(0)
    model = figures(*noise.uniform(.5e-3, 2e-3, 900))
    few = tuple(dataclasses.replace(
        call, forward=second, backward=second)
        for call, second in zip(model.calls, noise.uniform(
            .1e-3, 1e-3, 900), strict=True))
    model = dataclasses.replace(model, calls_few=few)
    found = ModelCosts(model).intervals(FEW)
    assert found.count < 900
    ends = [*(start.place for start in found.starts[1:]), 900]
    assert found.forward[1:] == pytest.approx(numpy.cumsum(
        [call.forward for call in few])[numpy.array(ends) - 1])


def test_a_plain_pass_is_dealt_out_to_calls_as_their_laps():
    """Laps take twice as long here as plain Chainer."""
    model = figures(.01, .03, plain=(.01, .03), plain_few=(.004, .012))
    found = ModelCosts(model).plain(SAMPLES)
    assert found.forward == pytest.approx([.0025, .0075])
    assert found.backward == pytest.approx([.0075, .0225])
    assert found.seconds == pytest.approx(.04)
    assert ModelCosts(model).plain(FEW).seconds == pytest.approx(.016)
    assert ModelCosts(model).plain(5).seconds == pytest.approx(.028)


def test_a_pass_of_no_time_has_none_to_deal_out():
    assert ModelCosts(figures(0.0, 0.0)).plain(4).seconds == 0


@given(st.floats(.001, 1), st.floats(.001, 1), st.floats(.1, 64))
def test_a_plain_pass_takes_some_time_whatever_noise_says(
        large, small, samples):
    model = figures(.01, plain=(large, large), plain_few=(small, small))
    found = ModelCosts(model).plain(samples).seconds
    assert found >= 2 * .5 * large * min(samples / SAMPLES, 1) * (1 - 1e-9)


@pytest.mark.parametrize(('sizes', 'times', 'expected'), [
    ((10, 40), 3.0, 3 * 40 + 3 * 10), ((30, 40), 3.0, 3 * 40 + 64),
    ((10, 30), 3.0, 3 * 30), ((40, 50), 2.0, 2 * 50), ((10, 40), 0.0, 0)])
def test_the_heap_keeps_what_updates_of_smaller_parameters_have_needed(
        sizes, times, expected):
    """Of sizes in MiB, of which those above 32 are given back."""
    model = figures(.1, .1)
    parameters = {
        name: Parameter((size << 18,), numpy.dtype('f')) for name, size
        in zip(model.parameters, sizes, strict=True)}
    costs = ModelCosts(dataclasses.replace(
        model, parameters=parameters, update_temporary=times))
    found = costs.intervals(8)
    assert found.updating(found.largest, found.largest_in_heap)[
        0, -1] == pytest.approx(expected * 2 ** 20)
