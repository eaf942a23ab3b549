"""Means on a rank that has no model, in units of the wire."""
from chainer_fp8pipe import formats
from chainer_fp8pipe.codecs import Cast, Fp8Paper, Fp8Ratio

import ml_dtypes
import numpy
import pytest

from .helpers import mean_of


def normal(size, spread=1000.0):
    return numpy.random.default_rng(0).normal(0, spread, size).astype(
        numpy.float32)


def test_tensors_take_no_memory():
    coding = Fp8Ratio().relay([10 ** 12, 5])
    assert coding.offsets == [0, 10 ** 12, 10 ** 12 + 5]


@pytest.mark.parametrize(('codec', 'dtype'), [
    (Cast('float16'), numpy.float16), (Fp8Ratio(), ml_dtypes.float8_e5m2)])
def test_a_mean_is_encoded_in_units_of_the_wire(codec, dtype):
    """NaN and infinity as well, and nothing is kept for the next."""
    total = normal(800, 30000)
    total[300:303] = numpy.nan, numpy.inf, -numpy.inf
    expected = (total / numpy.float32(3)).astype(dtype)
    for _ in range(2):
        wire = mean_of(codec.relay([300, 0, 500]), total, 3)
        numpy.testing.assert_array_equal(
            wire.view(dtype).astype(float), expected.astype(float))


def test_truncation_is_the_papers():
    mean, expected = normal(500), numpy.empty(500, numpy.uint8)
    formats.encode(mean, expected, rounding='truncate')
    numpy.testing.assert_array_equal(
        mean_of(Fp8Paper().relay([500]), mean, 1), expected)
