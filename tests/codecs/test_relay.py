"""The fp8 mean of a rank that has no parameters."""
from chainer_fp8pipe import fp8
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.relay import CodecRecipe, RelayedTensor, RelayState

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.codec_updates import begin

from .helpers import encode, random_tensors

SIZES = [300, 0, 1, 500]


def recipe(parts, rounding='nearest', error_feedback=True, headroom=1.0):
    return CodecRecipe('fp8', rounding, error_feedback,
                       tuple(RelayedTensor(*part) for part in parts), headroom)


def mean_of(made, total, count=1, start=0, site='sum 0 0'):
    """The wire of a mean, encoded in one piece."""
    codec, tensors = made
    wire = numpy.empty(total.size, codec.wire_dtype)
    codec.encode_mean(tensors, numpy.array(total, numpy.float32), count,
                      wire, start, site, (0, tensors.size))
    return wire


def values(wire):
    out = numpy.empty(wire.size, numpy.float32)
    fp8.decode(wire, out)
    return out.astype(float)


def normal(size, spread=1000.0, seed=0):
    return numpy.random.default_rng(seed).normal(0, spread, size).astype(
        numpy.float32)


# --- recipes ---------------------------------------------------------------

@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_a_cast_has_no_parts_and_is_made_again(dtype):
    tensors = random_tensors(SIZES)
    found = CodecRecipe.of(Cast(dtype), tensors, 0, tensors.size)
    assert found == CodecRecipe(dtype)
    codec, _ = found.make(RelayState(), 0, 3)
    assert (codec.name, codec.wire_dtype) == (dtype, numpy.dtype(dtype))


def test_an_fp8_recipe_names_what_lies_in_the_range():
    tensors = random_tensors(SIZES)
    tensors.loss_scale = 8.0
    codec = Fp8Ratio(rounding='truncate', error_feedback=False)
    encode(codec, tensors)
    units = {name: report.q / 8 for name, report
             in codec.report().items()}
    assert CodecRecipe.of(codec, tensors, 0, 301) == recipe(
        [('/l0/W', 300, units['/l0/W']), ('/l2/W', 1, units['/l2/W'])],
        'truncate', False, 4096.0)
    assert CodecRecipe.of(codec, tensors, 100, 311).parts == (
        ('/l0/W[100:300]', 200, units['/l0/W']),
        ('/l2/W', 1, units['/l2/W']), ('/l3/W[0:10]', 10, units['/l3/W']))


def test_a_recipe_of_blocks_names_tensors_and_follows_the_loss_scale():
    tensors = random_tensors(SIZES, grain=32)
    codec = BlockScaled('int4')
    for loss_scale, unit in (1.0, 1.0), (128.0, 1.0), (5.0, 0.8), (3.0, 4 / 3):
        codec.start(loss_scale)
        assert CodecRecipe.of(codec, tensors, 2, tensors.size) == CodecRecipe(
            'int4', '', True, tuple(RelayedTensor(name, size, unit) for
                                    name, size in (('/l0/W[64:300]', 236),
                                                   ('/l2/W', 1),
                                                   ('/l3/W', 500))))


def test_tensors_of_a_recipe_take_no_memory():
    _, tensors = recipe([('a', 10 ** 12, 1.0), ('b', 5, 1.0)]).make(
        RelayState(), 0, 0)
    assert tensors.offsets == [0, 10 ** 12, 10 ** 12 + 5]


# --- means -----------------------------------------------------------------

def test_a_mean_is_encoded_in_units_of_the_wire():
    total = normal(800, 30000)
    wire = mean_of(recipe([('a', 300, 1.0), ('b', 500, 2.0)]).make(
        RelayState(), 0, 0), total, 3)
    expected = (total / numpy.float32(3)).astype(ml_dtypes.float8_e5m2)
    numpy.testing.assert_array_equal(wire, expected.view(numpy.uint8))


@pytest.mark.parametrize('rounding', ['nearest', 'truncate', 'stochastic'])
@pytest.mark.parametrize('error_feedback', [True, False])
def test_what_an_encoding_leaves_out_comes_with_the_next(rounding,
                                                         error_feedback):
    kept, mean, sent = RelayState(), normal(800), 0
    for _ in range(200):
        sent = sent + values(mean_of(
            recipe([('a', 800, 1.0)], rounding, error_feedback).make(
                kept, 1, 0), mean))
    error = numpy.linalg.norm(sent / 200 - mean) / numpy.linalg.norm(mean)
    if error_feedback:
        assert error < 2e-3
    elif rounding == 'stochastic':
        assert 2e-3 < error < 0.02
    else:
        assert error > 0.02


@given(st.lists(st.tuples(st.floats(0.3, 3), st.floats(1e-3, 1e3)),
                min_size=1, max_size=12), st.integers(0, 2 ** 32))
def test_residuals_keep_their_gradients_value_when_scales_change(jobs, seed):
    """All that was sent and what is left over make up all that was given.

    In units of the gradient, where a tensor's wire is gradient / unit.
    """
    kept, given_, sent, magnitude = RelayState(), 0.0, 0.0, 0.0
    for unit, spread in jobs:
        mean = normal(20, spread, seed)
        made = recipe([('a', 20, unit)]).make(kept, 0, 0)
        given_ = given_ + mean.astype(float) * unit
        sent = sent + values(mean_of(made, mean)) * unit
        magnitude = magnitude + abs(mean.astype(float)) * unit
    left = kept.residuals.get(numpy, 'sum 0 0', 'a', 0, 20) * jobs[-1][0]
    # An earlier job's residual is at most an eighth of what it encoded.
    numpy.testing.assert_allclose(sent + left, given_, rtol=0,
                                  atol=1e-5 * magnitude.max())


def test_a_loss_scale_that_the_unit_follows_changes_no_residual():
    tensors = random_tensors([400])
    codec, units = Fp8Ratio(), []
    for loss_scale in (1.0, 1024.0):
        scaled = Tensors(tensors.names, [tensors.gradients[0] * numpy.float32(
            loss_scale)], tensors.parameters, loss_scale)
        begin(codec, scaled)
        codec.encode(scaled, numpy.empty(400, numpy.uint8))
        units.append(CodecRecipe.of(codec, scaled, 0, 400).parts[0].unit)
    assert units[0] == pytest.approx(units[1])


def test_units_at_the_ends_of_their_range_leave_residuals_finite():
    kept = RelayState()
    for unit in (1e30, 0.0, 1e-30, 1e30, 1e-30, 1e-30):
        wire = mean_of(recipe([('a', 50, unit)]).make(kept, 0, 0),
                       normal(50, 1e4))
        assert numpy.isfinite(values(wire)).all()
    residual = kept.residuals.get(numpy, 'sum 0 0', 'a', 0, 50)
    assert numpy.isfinite(residual).all()


def test_a_tensor_without_unit_keeps_the_one_before():
    kept = RelayState()
    for unit in (4.0, 0.0, 2.0):
        made = recipe([('a', 50, unit)]).make(kept, 0, 0)
        mean_of(made, normal(50) * (unit == 4.0))
        if unit == 4.0:
            left = kept.residuals.get(numpy, 'sum 0 0', 'a', 0, 50) * 4.0
            sent = 0
        else:
            sent = sent + unit * values(mean_of(made, numpy.zeros(50)))
    assert kept.units == {('sum 0 0', 'a'): 2.0}
    assert left.any()


def direct(codec, tensors, total, count):
    """The mean as a rank with parameters encodes it."""
    wire = numpy.empty(tensors.size, numpy.uint8)
    codec.encode_mean(tensors, total, count, wire, 0, 'sum 0 0',
                      (0, tensors.size))
    return wire


@pytest.mark.parametrize('moving', [False, True])
def test_a_constant_gradients_mean_converges_as_with_parameters(moving):
    """Two workers; q changes at every update, parameters by 2 % if told.

    With parameters, the error is 1 % of that without feedback in both cases.
    Without, moving parameters make it 13 %.
    """
    def error(relay, feedback=True, steps=100):
        codecs = [Fp8Ratio(period=1, rank=rank, error_feedback=feedback)
                  for rank in range(2)]
        kept, sent, scales = RelayState(), 0, []
        for step in range(steps):
            workers = [random_tensors(SIZES, seed) for seed in range(2)]
            parameters = random_tensors(SIZES).parameters
            if moving:
                parameters[0] += numpy.random.default_rng(step).normal(
                    0, 0.002, 300).astype('f4')
            for tensors in workers:
                tensors.parameters = parameters
                # The tensor's largest elements set q.
                tensors.gradients[0][:100] *= 1 + step % 5
            total = numpy.zeros(801, numpy.float32)
            # Both use the scales of the first.
            begin(codecs[0], workers[0],
                            lambda array: scales.append(array.copy()))
            begin(codecs[1], workers[1],
                            lambda array: array.__setitem__(..., scales[-1]))
            for codec, tensors in zip(codecs, workers, strict=True):
                wire = numpy.empty(801, numpy.uint8)
                codec.encode(tensors, wire)
                codec.accumulate(wire, total)
            made = CodecRecipe.of(codecs[0], tensors, 0, 801).make(kept, 0, 2)
            mean = (mean_of(made, total, 2) if relay
                    else direct(codecs[0], tensors, total, 2))
            codecs[0].decode(tensors, mean)
            sent = sent + numpy.concatenate(tensors.gradients).astype(float)
        true = numpy.mean([numpy.concatenate(random_tensors(
            SIZES, seed).gradients) for seed in range(2)], axis=0)
        # Those that were not multiplied.
        return numpy.linalg.norm((sent / steps - true)[100:])
    if not moving:
        assert error(True) < 1.1 * error(False)
    assert error(True) < error(True, feedback=False) / 5


# --- rounding --------------------------------------------------------------

def test_truncation_is_the_papers():
    mean = normal(500)
    wire = mean_of(recipe([('a', 500, 1.0)], 'truncate', False).make(
        RelayState(), 0, 0), mean)
    expected = numpy.empty(500, numpy.uint8)
    fp8.encode(mean, expected, rounding='truncate')
    numpy.testing.assert_array_equal(wire, expected)


def test_stochastic_rounding_depends_on_seed_rank_job_and_site_only():
    mean = normal(2000)
    made = recipe([('a', 2000, 1.0)], 'stochastic', False)

    def wire(seed=0, rank=0, jobs=0, **place):
        kept = RelayState()
        for _ in range(jobs):
            made.make(kept, seed, rank)
        return mean_of(made.make(kept, seed, rank), mean, **place)
    numpy.testing.assert_array_equal(wire(), wire())
    for other in (wire(seed=1), wire(rank=1), wire(jobs=1),
                  wire(site='sum 0 1')):
        assert (other != wire()).mean() > 0.1


def test_jobs_under_way_together_round_alike_in_any_order():
    mean = normal(2000)
    made = recipe([('a', 2000, 1.0)], 'stochastic', False)
    wires = []
    for order in ((0, 1), (1, 0)):
        kept = RelayState()
        jobs = [made.make(kept, 0, 0) for _ in range(2)]
        found = {job: mean_of(jobs[job], mean) for job in order}
        wires.append([found[0], found[1]])
    numpy.testing.assert_array_equal(*wires)


def test_nan_and_infinity_travel_and_leave_nothing_behind():
    kept = RelayState()
    made = recipe([('a', 4, 1.0)])
    mean = numpy.array([1.1, numpy.nan, numpy.inf, -numpy.inf])
    sent = values(mean_of(made.make(kept, 0, 0), mean))
    numpy.testing.assert_array_equal(sent[1:], mean[1:])
    again = values(mean_of(made.make(kept, 0, 0), numpy.ones(4)))
    numpy.testing.assert_array_equal(again[1:], 1)


def test_pieces_of_any_size_give_the_wire_of_the_whole():
    total = normal(800, 30000)
    made = recipe([('a', 300, 1.0), ('b', 500, 2.0)])
    kept = RelayState(), RelayState()
    for _ in range(3):
        whole = mean_of(made.make(kept[0], 0, 0), total)
        pieces = made.make(kept[1], 0, 0)
        wire = numpy.concatenate([
            mean_of(pieces, total[start:start + 130], start=start)
            for start in range(0, 800, 130)])
        numpy.testing.assert_array_equal(wire, whole)
