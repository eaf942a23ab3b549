"""Means on a rank that has no model, in units of the wire."""
from chainer_fp8pipe import formats
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Paper, Fp8Ratio, Part

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import SITE, encode, mean_of, random_tensors

SIZES = [300, 0, 1, 500]
PLAIN = Fp8Ratio()
PAPER = Fp8Paper()


def relay(state, parts, rank=0):
    return state.codec.relay(state, tuple(Part(*part) for part in parts),
                             rank)


def kept(state, size, name='a'):
    return state.residual(numpy, SITE, name, 0, size)


def values(wire):
    out = numpy.empty(wire.size, numpy.float32)
    formats.decode(wire, out)
    return out.astype(float)


def normal(size, spread=1000.0, seed=0):
    return numpy.random.default_rng(seed).normal(0, spread, size).astype(
        numpy.float32)


# --- parts -----------------------------------------------------------------

def test_parts_are_tensors_and_their_units():
    state = Fp8Ratio().init()
    tensors = random_tensors(SIZES, loss_scale=8.0)
    encode(state, tensors)
    units = {name: report.q / 8
             for name, report in state.codec.report(state).items()}
    assert state.codec.parts(state, tensors) == tuple(
        (f'/l{number}/W', size, units.get(f'/l{number}/W', 0.0))
        for number, size in enumerate(SIZES))
    cast = Cast('float16')
    assert cast.parts(cast.init(), tensors) == tuple(
        (f'/l{number}/W', size, 0.0) for number, size in enumerate(SIZES))
    blocks = BlockScaled()
    state = blocks.init()
    tensors = random_tensors(SIZES, grain=32, loss_scale=1000.0)
    encode(state, tensors)
    assert blocks.parts(state, tensors) == tuple(
        (f'/l{number}/W', size, 1.024) for number, size in enumerate(SIZES))


def test_parts_take_no_memory():
    coding = relay(PLAIN.init(), [('a', 10 ** 12, 1.0), ('b', 5, 1.0)])
    assert coding.offsets == [0, 10 ** 12, 10 ** 12 + 5]


def test_the_mean_of_floats_needs_no_units():
    coding = relay(Cast('float16').init(), [('', 100, 0.0)])
    total = normal(100)
    numpy.testing.assert_array_equal(
        mean_of(coding, total, 3),
        (total / numpy.float32(3)).astype(numpy.float16))


# --- means -----------------------------------------------------------------

def test_a_mean_is_encoded_in_units_of_the_wire():
    total = normal(800, 30000)
    wire = mean_of(relay(Fp8Ratio(error_feedback=False).init(),
                         [('a', 300, 1.0), ('b', 500, 2.0)]),
                   total, 3)
    expected = (total / numpy.float32(3)).astype(ml_dtypes.float8_e5m2)
    numpy.testing.assert_array_equal(wire, expected.view(numpy.uint8))


@given(st.lists(st.tuples(st.floats(0.3, 3), st.floats(1e-3, 50)),
                min_size=1, max_size=12), st.integers(0, 2 ** 32))
def test_residuals_keep_their_gradients_value_when_scales_change(jobs, seed):
    """All that was sent and what is left over make up all that was given.

    In units of the gradient, where a tensor's wire is gradient / unit.
    """
    state, given_, sent, magnitude = PLAIN.init(), 0.0, 0.0, 0.0
    for unit, spread in jobs:
        mean = normal(20, spread, seed)
        made = relay(state, [('a', 20, unit)])
        given_ = given_ + mean.astype(float) * unit
        sent = sent + values(mean_of(made, mean, 1)) * unit
        magnitude = magnitude + abs(mean.astype(float)) * unit
    left = kept(state, 20) * jobs[-1][0]
    # An earlier job's residual is at most an eighth of what it encoded.
    numpy.testing.assert_allclose(sent + left, given_, rtol=0,
                                  atol=1e-5 * magnitude.max())


def test_a_loss_scale_that_the_unit_follows_changes_no_residual():
    state, units = Fp8Ratio().init(), []
    for loss_scale in (1.0, 1024.0):
        tensors = random_tensors([400], loss_scale=loss_scale)
        encode(state, tensors)
        units.append(state.codec.parts(state, tensors)[0].unit)
    assert units[0] == pytest.approx(units[1])


def test_units_at_the_ends_of_their_range_leave_residuals_finite():
    state = PLAIN.init()
    for unit in (1e30, 0.0, 1e-30, 1e30, 1e-30, 1e-30):
        wire = mean_of(relay(state, [('a', 50, unit)]), normal(50, 1e4), 1)
        assert numpy.isfinite(values(wire)).all()
    assert numpy.isfinite(kept(state, 50)).all()


def test_a_tensor_without_unit_keeps_the_one_before():
    state = PLAIN.init()
    mean_of(relay(state, [('a', 50, 4.0)]), normal(50), 1)
    before = kept(state, 50).copy()
    relay(state, [('a', 50, 0.0)]).means([(SITE, (0, 50))])
    numpy.testing.assert_array_equal(kept(state, 50), before)
    relay(state, [('a', 50, 2.0)]).means([(SITE, (0, 50))])
    numpy.testing.assert_array_equal(kept(state, 50), 2 * before)
    assert before.any()


# --- rounding --------------------------------------------------------------

def test_truncation_is_the_papers():
    mean, expected = normal(500), numpy.empty(500, numpy.uint8)
    state = PAPER.init()
    formats.encode(mean, expected, rounding='truncate')
    numpy.testing.assert_array_equal(
        mean_of(relay(state, [('a', 500, 1.0)]), mean, 1), expected)


def test_nan_and_infinity_travel_and_leave_nothing_behind():
    state = PLAIN.init()
    mean = numpy.array([1.1, numpy.nan, numpy.inf, -numpy.inf])
    sent = values(mean_of(relay(state, [('a', 4, 1.0)]), mean, 1))
    numpy.testing.assert_array_equal(sent[1:], mean[1:])
    again = values(mean_of(relay(state, [('a', 4, 1.0)]), numpy.ones(4), 1))
    numpy.testing.assert_array_equal(again[1:], 1)


def test_an_outlier_is_over_with_the_next_mean():
    state = PLAIN.init()
    usual = normal(32, 1.0)
    mean = usual.copy()
    mean[9] = 1e9
    for _ in range(2):
        sent = values(mean_of(relay(state, [('a', 32, 1.0)]), mean, 1))
        mean = usual
    assert abs(sent[9]) < 2 * formats.MAX / PLAIN.room
