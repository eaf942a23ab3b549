"""Arguments that are refused, and how the message names them."""
from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import FORMATS

import numpy as np
import pytest

INT4 = FORMATS['int4']


def floats(n=4):
    return np.zeros(n, np.float32)


def codes(n=4):
    return np.zeros(n, np.uint8)


def records(n=2, dtype='V17'):
    return np.zeros(n, dtype)


def frozen(array):
    array.flags.writeable = False
    return array


def refused(error, match, operation, *arrays, **options):
    return pytest.param(operation, arrays, options, error, match, id=match)


ROOM, CODES = floats(64), codes(8)
INSIDE = ROOM.view(np.uint8)[:34].view('V17')
SCALE = {'scale': 1.0}


@pytest.mark.parametrize(('operation', 'arrays', 'options', 'error',
                          'match'), [
    refused(TypeError, 'values must be .* not list', formats.encode, [1.0],
            codes(1)),
    *(refused(TypeError, f'values has dtype {np.dtype(dtype)}, expected float',
              formats.encode, np.zeros(4, dtype), codes())
      for dtype in (np.float16, np.float64, np.int32, '>f4')),
    refused(TypeError, 'out has dtype int8, expected uint8', formats.encode,
            floats(), np.zeros(4, np.int8)),
    refused(TypeError, 'float16, expected uint8 or float32',
            formats.ratio_decode, np.zeros(4, 'f2'), floats(), floats(),
            **SCALE),
    refused(TypeError, 'wire must be .* not list', formats.ratio_decode, [1],
            floats(1), floats(1), **SCALE),
    refused(ValueError, 'values has 4, out has 5', formats.encode, floats(4),
            codes(5)),
    *(refused(ValueError, 'values .* must be C-contiguous', formats.encode,
              values, codes(values.size))
      for values in (floats(8)[::2], np.zeros((2, 3), 'f', 'F'))),
    refused(ValueError, 'out is written, but .* read-only', formats.encode,
            floats(), frozen(codes())),
    refused(ValueError, 'out shares memory with values', formats.encode,
            ROOM[:4], ROOM.view(np.uint8)[:4]),
    refused(ValueError, 'out shares memory with a', formats.add, CODES[:4],
            codes(), CODES[1:5]),
    refused(ValueError, 'residual shares memory with grad',
            formats.ratio_encode, ROOM, floats(64), codes(64), residual=ROOM,
            **SCALE),
    refused(ValueError, r"'up', expected one of \('nearest'", formats.encode,
            floats(), codes(), rounding='up'),
    refused(TypeError, 'float', formats.encode, floats(), codes(), seed=1.5),
    *(refused(ValueError, 'scale is', operation, *arrays, scale=scale)
      for scale in (0.0, -1.0, np.inf, np.nan, 1e40, 1e-40)
      for operation, arrays in (
          (formats.ratio_encode, (floats(), floats(), codes())),
          (formats.ratio_decode, (codes(), floats(), floats())))),
    *(refused(ValueError, 'epsilon is', formats.ratio_encode, floats(),
              floats(), codes(), epsilon=epsilon, **SCALE)
      for epsilon in (0.0, -1.0, np.inf, np.nan, 1e-60)),
    # Records.
    refused(TypeError, 'values must be a NumPy or CuPy array, not',
            INT4.encode, [0.0] * 64, records()),
    refused(TypeError, 'values has dtype float64', INT4.encode, np.zeros(64),
            records()),
    refused(ValueError, 'values has shape .2, 32.', INT4.encode,
            np.zeros((2, 32), 'f4'), records()),
    refused(ValueError, 'values .*contiguous', INT4.encode, floats(128)[::2],
            records()),
    refused(ValueError, '65 .*need 3 records, not 2', INT4.encode, floats(65),
            records()),
    refused(ValueError, 'need 1 records, not 2', INT4.encode, floats(32),
            records()),
    refused(TypeError, 'residual has dtype', INT4.encode, floats(64),
            records(), residual=np.zeros(64, 'f2')),
    *(refused(ValueError, f'residual has {n}', INT4.encode, floats(64),
              records(), residual=floats(n)) for n in (32, 63)),
    refused(TypeError, 'records has dtype uint8', INT4.encode, floats(64),
            codes(34)),
    refused(TypeError, r'expected \|V', INT4.encode, floats(64),
            records(2, 'V16')),
    refused(ValueError, 'records .*contiguous', INT4.encode, floats(64),
            records(3)[::2]),
    refused(ValueError, 'residual shares memory with values', INT4.encode,
            ROOM, records(), residual=ROOM),
    refused(ValueError, 'records shares memory with values', INT4.encode,
            ROOM, INSIDE),
    *(refused(error, match, operation, given, array)
      for operation in (INT4.decode, INT4.accumulate)
      for given, array, error, match in (
          (INSIDE, ROOM, ValueError, 'shares memory with records'),
          (records(), np.zeros(64, 'f2'), TypeError, 'has dtype float16'),
          (records(), floats(65), ValueError, 'need 3 records'),
          (records(), frozen(floats(64)), ValueError, 'read-only'))),
])
def test_other_arguments_are_refused(operation, arrays, options, error,
                                     match):
    with pytest.raises(error, match=match):
        operation(*arrays, **options)


def test_an_input_may_be_read_only():
    formats.encode(frozen(floats()), codes())
    INT4.decode(frozen(records()), floats(64))
