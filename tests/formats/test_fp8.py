"""fp8's functions on NumPy arrays against ml_dtypes."""
from chainer_fp8pipe import formats

import numpy as np
import pytest

from . import reference

ALL_CODES = np.arange(256, dtype=np.uint8)

pytestmark = pytest.mark.filterwarnings(
    'ignore:.*encountered in:RuntimeWarning')


def encode(values, **options):
    values = np.ascontiguousarray(values, np.float32)
    codes = np.empty(values.shape, np.uint8)
    formats.encode(values, codes, **options)
    return codes


def decode(codes):
    values = np.empty(codes.shape, np.float32)
    formats.decode(codes, values)
    return values


def test_every_code_has_the_value_of_ml_dtypes_and_comes_back():
    assert reference.same_bits(decode(ALL_CODES), reference.decode(ALL_CODES))
    codes = ALL_CODES[(ALL_CODES & 0x7F) <= 0x7C]
    for rounding in formats.ROUNDINGS:
        assert np.array_equal(encode(decode(codes), rounding=rounding), codes)
    assert reference.VALUES.max() == formats.MAX


@pytest.mark.parametrize('values', [
    np.arange(65536, dtype=np.uint16).view(np.float16).astype('f'),
    reference.interesting_floats(), reference.random_bits(1_000_000),
    reference.random_in_range(1_000_000)], ids=[
        'all halves', 'boundaries', 'random bits', 'random in range'])
def test_codes_are_those_of_the_reference(values):
    assert np.array_equal(encode(values), reference.nearest(values))
    assert np.array_equal(encode(values, rounding='truncate'),
                          reference.truncate(values))


# --- arguments ---------------------------------------------------------------

FLOATS, CODES = np.zeros(4, 'f'), np.zeros(4, 'u1')
ROOM = np.zeros(8, 'f')
FROZEN = np.zeros(4, 'u1')
FROZEN.flags.writeable = False


@pytest.mark.parametrize(('call', 'error', 'match'), [
    (lambda: formats.encode([1.0], CODES), TypeError, 'must be an ndarray'),
    *((lambda dtype=dtype: formats.encode(np.zeros(4, dtype), CODES),
       TypeError, 'type float32') for dtype in ('f2', 'f8', 'i4', '>f4')),
    (lambda: formats.decode(CODES.view('i1'), FLOATS), TypeError, 'uint8'),
    (lambda: formats.encode(FLOATS, CODES[:3]), ValueError, '4 and 3'),
    (lambda: formats.encode(ROOM[::2], CODES), TypeError, 'C_CONTIGUOUS'),
    (lambda: formats.encode(FLOATS, FROZEN), TypeError, 'WRITEABLE'),
    (lambda: formats.encode(FLOATS, CODES, rounding='up'), ValueError,
     "'up', expected one of"),
    *((lambda scale=scale: formats.with_inverse(scale), ValueError, 'scale')
      for scale in (0, -1, np.nan, np.inf, 1e39, 1e-39, 1e-46))])
def test_what_is_not_allowed_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
