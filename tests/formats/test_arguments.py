"""Arguments that are refused, and how the message names them."""
from chainer_fp8pipe import formats

import numpy as np
import pytest


def floats(n=4):
    return np.zeros(n, np.float32)


def codes(n=4):
    return np.zeros(n, np.uint8)


def test_a_list_is_not_an_array():
    with pytest.raises(TypeError, match='values must be .* not list'):
        formats.encode([1.0], codes(1))


@pytest.mark.parametrize('dtype', [np.float16, np.float64, np.int32, '>f4'])
def test_another_dtype_is_named(dtype):
    values = np.zeros(4, dtype)
    message = f'values has dtype {values.dtype}, expected float32'
    with pytest.raises(TypeError, match=message):
        formats.encode(values, codes())


def test_codes_must_be_uint8():
    with pytest.raises(TypeError, match='out has dtype int8, expected uint8'):
        formats.encode(floats(), np.zeros(4, np.int8))


def test_a_wire_may_be_of_two_dtypes_only():
    with pytest.raises(TypeError, match='float16, expected uint8 or float32'):
        formats.ratio_decode(
            np.zeros(4, np.float16), floats(), floats(), scale=1.0)
    with pytest.raises(TypeError, match='wire must be .* not list'):
        formats.ratio_decode([1], floats(1), floats(1), scale=1.0)


def test_sizes_that_differ_are_listed():
    with pytest.raises(ValueError, match='values has 4, out has 5'):
        formats.encode(floats(4), codes(5))


@pytest.mark.parametrize(
    'values', [floats(8)[::2], np.zeros((2, 3), 'f', 'F')])
def test_an_array_with_gaps_or_in_fortran_order_is_refused(values):
    with pytest.raises(ValueError, match='values .* must be C-contiguous'):
        formats.encode(values, codes(values.size))


def test_an_output_must_be_writeable():
    out = codes()
    out.flags.writeable = False
    with pytest.raises(ValueError, match='out is written, but .* read-only'):
        formats.encode(floats(), out)


def test_an_input_may_be_read_only():
    values = floats()
    values.flags.writeable = False
    formats.encode(values, codes())


def test_an_output_may_not_share_memory_with_an_input():
    room = floats(4)
    with pytest.raises(ValueError, match='out shares memory with values'):
        formats.encode(room, room.view(np.uint8)[:4])
    a = codes(8)
    with pytest.raises(ValueError, match='out shares memory with a'):
        formats.add(a[:4], codes(4), a[1:5])


def test_the_residual_may_not_be_the_gradient():
    gradient = floats()
    with pytest.raises(ValueError, match='residual shares memory with grad'):
        formats.ratio_encode(
            gradient, floats(), codes(), scale=1.0, residual=gradient)


def test_a_rounding_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'up', expected one of \('nearest'"):
        formats.encode(floats(), codes(), rounding='up')


def test_a_seed_must_be_an_integer():
    with pytest.raises(TypeError, match='float'):
        formats.encode(floats(), codes(), seed=1.5)


@pytest.mark.parametrize('scale', [0.0, -1.0, np.inf, np.nan, 1e40, 1e-40])
def test_a_scale_must_be_positive_and_invertible(scale):
    with pytest.raises(ValueError, match='scale is'):
        formats.ratio_encode(floats(), floats(), codes(), scale=scale)
    with pytest.raises(ValueError, match='scale is'):
        formats.ratio_decode(codes(), floats(), floats(), scale=scale)


@pytest.mark.parametrize('epsilon', [0.0, -1.0, np.inf, np.nan, 1e-60])
def test_epsilon_must_be_positive(epsilon):
    with pytest.raises(ValueError, match='epsilon is'):
        formats.ratio_encode(
            floats(), floats(), codes(), scale=1.0, epsilon=epsilon)
