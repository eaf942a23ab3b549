"""How partial sums are held and travel."""
from chainer_fp8pipe.allreduce.sums import WideSums, WireSums
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors

import ml_dtypes
import numpy
import pytest

PARTS = [slice(2, 6), slice(8, 11)]


def fused(size=12):
    generator = numpy.random.default_rng(0)
    return Tensors(['/x'], [generator.normal(0, 1, size).astype('f4')],
                   [generator.normal(0, 1, size).astype('f4')])


def codes(values):
    return numpy.asarray(values, numpy.float32).astype(
        ml_dtypes.float8_e5m2).view(numpy.uint8)


def values(codes):
    return codes.view(ml_dtypes.float8_e5m2).astype(numpy.float64)


def test_sums_in_the_wires_format_are_made_where_the_contribution_lies():
    wire = numpy.arange(12, dtype=numpy.float32)
    sums = WireSums(Cast('float32'), wire, contributes=True)
    sums.add(PARTS, numpy.full(7, 100, numpy.float32), True, False)
    sums.add(PARTS, numpy.full(7, 1000, numpy.float32), False, True)
    expected = numpy.arange(12.0)
    expected[[2, 3, 4, 5, 8, 9, 10]] += 1100
    numpy.testing.assert_array_equal(wire, expected)
    message = numpy.empty(7, numpy.float32)
    sums.message(PARTS, message)
    numpy.testing.assert_array_equal(
        message, expected[[2, 3, 4, 5, 8, 9, 10]])


def test_who_contributes_nothing_begins_with_what_comes_first():
    wire = numpy.full(12, numpy.nan, numpy.float32)
    sums = WireSums(Cast('float32'), wire, contributes=False)
    sums.add(PARTS, numpy.full(7, 1, numpy.float32), True, False)
    sums.add(PARTS, numpy.full(7, 2, numpy.float32), False, False)
    numpy.testing.assert_array_equal(wire[[2, 3, 4, 5, 8, 9, 10]], 3)
    assert numpy.isnan(wire[[0, 1, 6, 7, 11]]).all()


@pytest.mark.parametrize('contributes', [True, False])
@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_wide_sums_take_contributions_in_fp8_and_sums_as_they_travel(
        dtype, contributes):
    wire = codes(numpy.linspace(-3, 3, 12))
    own = values(wire)[[2, 3, 4, 5, 8, 9, 10]] * contributes
    sums = WideSums(Fp8Ratio(), fused(), wire, PARTS, contributes,
                    numpy.dtype(dtype), workers=5)
    first = codes(numpy.linspace(5, 9, 7))
    sums.add(PARTS, first, True, False)
    travelled = numpy.empty(7, dtype)
    sums.message(PARTS, travelled)
    # Of 5 workers: divided by 8, so that 5 x 57344 fits into float16.
    shrink = 8 if dtype == 'float16' else 1
    numpy.testing.assert_array_equal(
        travelled, ((own + values(first)) / shrink).astype(dtype))
    sums.add(PARTS, travelled, False, True)
    again = numpy.empty(7, dtype)
    sums.message(PARTS, again)
    numpy.testing.assert_array_equal(again, 2 * travelled)


def test_saturated_contributions_of_many_ranks_fit_into_float16():
    wire = codes(numpy.full(12, 57344))
    sums = WideSums(Fp8Ratio(), fused(), wire, PARTS, True,
                    numpy.dtype('float16'), workers=1000)
    for rank in range(999):
        sums.add(PARTS, wire[:7], rank == 0, False)
    message = numpy.empty(7, numpy.float16)
    sums.message(PARTS, message)
    assert numpy.isfinite(message).all()
    numpy.testing.assert_allclose(message, 57344 * 1000 / 1024, rtol=1e-3)


def test_the_second_level_begins_with_the_first_ones_mean():
    codec = Cast('float16')
    wire = numpy.arange(12, dtype=numpy.float16)
    sums = WideSums(codec, fused(), wire, PARTS, True,
                    numpy.dtype('float32'), workers=4)
    sums.add(PARTS, numpy.full(7, 10, numpy.float16), True, False)
    sums.encode(PARTS, (2, 11), 2, 'inside')
    numpy.testing.assert_array_equal(wire[2:6], [6, 6.5, 7, 7.5])
    sums.add(PARTS, numpy.full(7, 20, numpy.float16), True, False)
    sums.encode(PARTS, (2, 11), 2, 'between')
    numpy.testing.assert_array_equal(wire[2:6], [13, 13.25, 13.5, 13.75])
    numpy.testing.assert_array_equal(wire[[0, 1, 6, 7, 11]],
                                     [0, 1, 6, 7, 11])
