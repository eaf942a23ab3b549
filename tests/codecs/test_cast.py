from chainer_fp8pipe.codecs import Cast

import numpy
import pytest

from .helpers import encode, random_tensors, round_trip

SIZES = [5, 0, 1, 1000]


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_a_round_trip_equals_numpys_cast(dtype):
    tensors = random_tensors(SIZES)
    finite, decoded = round_trip(Cast(dtype), tensors)
    assert finite
    for gradient, result in zip(tensors.gradients, decoded, strict=True):
        numpy.testing.assert_array_equal(
            result, gradient.astype(dtype).astype(numpy.float32))


def test_prescale_multiplies_before_the_cast():
    tensors = random_tensors([100], spread=1e5)     # overflows unscaled
    codec = Cast('float16')
    wire = numpy.empty(100, numpy.float16)
    codec.encode(tensors, wire, 0.125)
    numpy.testing.assert_array_equal(
        wire, (tensors.gradients[0] / 8).astype(numpy.float16))


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_the_mean_of_sums_is_that_of_float64(dtype):
    codec = Cast(dtype)
    ranks = [random_tensors(SIZES, seed) for seed in range(3)]
    total = numpy.zeros(1006, 'f4')
    wires = [encode(codec, tensors) for tensors in ranks]
    for wire in wires:
        codec.accumulate(wire, total)
    mean = numpy.empty(1006, dtype)
    codec.encode_mean(ranks[0], total, 3, mean, 0, 'all', (0, mean.size))
    expected = numpy.mean([w.astype(numpy.float64) for w in wires], axis=0)
    numpy.testing.assert_allclose(
        mean.astype(numpy.float64), expected,
        rtol=2 * numpy.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize('bad', [numpy.nan, numpy.inf, -numpy.inf])
def test_a_gradient_that_is_not_finite_is_named_and_seen(bad):
    tensors = random_tensors(SIZES)
    tensors.gradients[3][7] = bad
    codec = Cast('float32')
    finite, decoded = round_trip(codec, tensors)
    assert not finite
    assert codec.nonfinite == ['the gradient of /l3/W']
    numpy.testing.assert_array_equal(decoded[3][7], numpy.float32(bad))


def test_a_gradient_too_large_for_float16_is_named_as_not_finite():
    tensors = random_tensors(SIZES)
    tensors.gradients[0][0] = 1e6
    codec = Cast('float16')
    finite, _ = round_trip(codec, tensors)
    assert not finite
    assert codec.nonfinite == ['the gradient of /l0/W']


def test_large_values_whose_sum_overflows_are_still_finite():
    tensors = random_tensors([4])
    tensors.gradients[0][...] = 3e38
    codec = Cast('float32')
    finite, _ = round_trip(codec, tensors)
    assert finite
    assert codec.nonfinite == []


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match='float64'):
        Cast('float64')


def test_state_of_another_codec_is_refused():
    codec = Cast('float32')
    codec.load_state(codec.state())
    with pytest.raises(ValueError, match='updates'):
        codec.load_state({'updates': numpy.asarray(1)})
