"""Floating-point arrays as fp8, against ml_dtypes."""
from chainer_fp8pipe.channel import fp8_wire

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst

from tests.codecs import fake_cupy

FLOATS = ['f2', 'f4', 'f8']


def cross(values, xp=numpy):
    """The values that arrive, and the exponent and codes that travelled."""
    part = numpy.full(fp8_wire.EXPONENT + values.size, 99, numpy.uint8)
    fp8_wire.encode(values, part)
    return fp8_wire.decode(part, values.dtype, xp), part


def reference(values):
    """In float64, with ml_dtypes' E5M2 and a loop that finds the scale."""
    exact = values.astype(numpy.float64)
    finite = numpy.abs(exact[numpy.isfinite(exact)])
    largest = finite.max(initial=0.0)
    scale = 0
    if largest:
        while numpy.ldexp(largest, scale) <= 57344:
            scale += 1
        while numpy.ldexp(largest, scale) > 57344:
            scale -= 1
    rounded = numpy.ldexp(exact, scale).astype(numpy.float32).astype(
        ml_dtypes.float8_e5m2).astype(numpy.float64)
    with numpy.errstate(over='ignore'):
        back = numpy.ldexp(rounded, -scale)
    most = numpy.finfo(values.dtype).max
    finite = numpy.isfinite(exact)
    back[finite] = numpy.clip(back[finite], -most, most)
    return back.astype(values.dtype), scale


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('size', [1, 3, 1000])
@pytest.mark.parametrize('magnitude', [1e-4, 1.0, 300.0])
def test_random_values_arrive_as_ml_dtypes_rounds_them(
        dtype, size, magnitude):
    values = (numpy.random.default_rng(size).standard_normal(size)
              * magnitude).astype(dtype)
    found, part = cross(values)
    wanted, scale = reference(values)
    assert found.dtype == values.dtype
    assert int(part[:4].view('<i4')[0]) == scale
    numpy.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize('dtype', ['f4', 'f8'])
@given(data=st.data())
def test_any_normal_values_arrive_as_ml_dtypes_rounds_them(dtype, data):
    values = data.draw(nst.arrays(dtype, st.integers(1, 20), elements={
        'allow_subnormal': False}))
    found, _ = cross(values)
    numpy.testing.assert_array_equal(found, reference(values)[0])


@pytest.mark.parametrize('dtype', FLOATS)
def test_nan_and_infinity_cross_and_set_no_scale(dtype):
    values = numpy.array([1.0, numpy.nan, -numpy.inf, 0.3, numpy.inf], dtype)
    found, part = cross(values)
    assert int(part[:4].view('<i4')[0]) == 15       # 1 becomes 32768
    numpy.testing.assert_array_equal(
        found, numpy.array([1.0, numpy.nan, -numpy.inf, 0.3125, numpy.inf],
                           dtype))


@pytest.mark.parametrize('dtype', FLOATS)
def test_nothing_but_nan_infinity_or_zero_is_legal(dtype):
    for text in (['nan'], ['inf'], ['-inf', 'nan'], ['0', '-0'],
                 ['0', 'inf']):
        values = numpy.array(text, dtype)
        numpy.testing.assert_array_equal(cross(values)[0], values)


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('sign', [1, -1])
def test_the_largest_number_does_not_become_infinite(dtype, sign):
    """It lies nearest to a power of two that the dtype does not have."""
    values = sign * numpy.array([numpy.finfo(dtype).max, 1], dtype)
    assert cross(values)[0][0] == values[0]


@pytest.mark.parametrize('value', [57344.0, 57345.0, 28672.0, 7.0, 7.01])
def test_the_largest_magnitude_comes_to_just_below_57344(value):
    _, part = cross(numpy.array([0.1, -value], numpy.float32))
    scale = int(part[:4].view('<i4')[0])
    assert 28672 < value * 2.0 ** scale <= 57344


@pytest.mark.parametrize(('dtype', 'lost'), [
    ('f2', 0.0), ('f4', 2.0 ** -143), ('f8', 2.0 ** -1039)])
def test_subnormal_numbers_err_by_no_more_than_the_scale_allows(dtype, lost):
    """Half of fp8's smallest number, at a scale of 2 ** 126 or 2 ** 1022."""
    tiny = numpy.finfo(dtype).smallest_subnormal
    values = tiny * numpy.array([0, 1, 2, 100, 500], dtype)
    found, _ = cross(values)
    assert (abs(found.astype('f8') - values) <= values / 8 + lost).all()


def test_a_device_sends_and_gets_the_same_bits():
    values = numpy.random.default_rng(0).standard_normal(1000)
    with fake_cupy.installed() as cupy:
        for dtype in FLOATS:
            for bad in (1.0, numpy.nan, numpy.inf, 1e30, 6e4):
                host = values.astype(dtype)
                with numpy.errstate(over='ignore'):
                    host[3] = bad
                wanted, part = cross(host)
                found, same = cross(fake_cupy.ndarray(host), cupy)
                assert isinstance(found, cupy.ndarray)
                numpy.testing.assert_array_equal(same, part)
                numpy.testing.assert_array_equal(found.get(), wanted)
