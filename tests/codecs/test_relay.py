"""Means on a rank that has no model, in units of the wire."""
from chainer_fp8pipe.codecs import Cast, Fp8Paper, Fp8Ratio

import numpy
import pytest

from tests.formats import reference

from .helpers import mean_of


def test_tensors_take_no_memory():
    coding = Fp8Ratio().relay([10 ** 12, 5])
    assert coding.offsets == [0, 10 ** 12, 10 ** 12 + 5]


@pytest.mark.parametrize(('codec', 'encoded'), [
    (Cast('float16'), lambda mean: mean.astype('f2')),
    (Fp8Ratio(), reference.nearest), (Fp8Paper(), reference.truncate)])
def test_a_mean_is_encoded_in_units_of_the_wire(codec, encoded):
    """NaN and infinity as well, and nothing is kept for the next."""
    total = numpy.random.default_rng(0).normal(0, 30000, 800).astype('f4')
    total[300:303] = numpy.nan, numpy.inf, -numpy.inf
    expected = encoded(total / numpy.float32(3))
    for _ in range(2):
        wire = mean_of(codec.relay([300, 0, 500]), total, 3)
        numpy.testing.assert_array_equal(wire.view(expected.dtype), expected)
