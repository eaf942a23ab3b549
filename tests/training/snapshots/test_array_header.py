import io

from chainer_fp8pipe.training.snapshots.array_header import (
    LONGEST,
    header_of,
    parse_header,
)

import numpy
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

from .damage import DTYPES, SHAPES, header

DTYPE = (arrays.scalar_dtypes() | arrays.unicode_string_dtypes(max_len=9)
         | arrays.byte_string_dtypes(max_len=9))


@given(arrays.arrays(DTYPE, arrays.array_shapes(min_dims=0, min_side=0)))
def test_headers_are_those_that_numpy_reads(value):
    file = io.BytesIO(header_of(value) + value.tobytes())
    found = numpy.lib.format.read_array(file, allow_pickle=False)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    assert len(header_of(value)) % 64 == 0


@given(arrays.arrays(DTYPE, arrays.array_shapes(min_dims=0, min_side=0)))
def test_headers_that_numpy_writes_are_read(value):
    value = value.T
    file = io.BytesIO()
    numpy.lib.format.write_array(file, value, allow_pickle=False)
    found = parse_header(file.getvalue()[:LONGEST])
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.size + found.data == len(file.getvalue())
    assert found.by_columns == (value.flags.f_contiguous
                                and not value.flags.c_contiguous)


@pytest.mark.parametrize('shape', SHAPES)
def test_a_shape_is_one_or_an_error(shape):
    try:
        found = parse_header(header("'<f4'", shape))
    except ValueError:
        return
    assert repr(found.shape) == shape
    assert found.data < 1 << 62


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_dtype_is_of_numbers_or_texts_or_an_error(dtype):
    try:
        found = parse_header(header(dtype, '(2,)'))
    except ValueError:
        return
    assert found.dtype.kind in 'biufcSUMmO'
    assert found.dtype.itemsize


@pytest.mark.parametrize('head', [
    b'', b'\x93NUMPY\1\0', b'\x93NUMPY\2\0' + bytes(60),
    b'\x93NUMPY\1\0\xff\xff' + bytes(60),
    header("'<f4'", '(2,)')[:-9], header("'<f4'", '(2,)', '__import__("os")'),
    header("'<f4'", '(2,)') .replace(b'descr', b'descx')])
def test_another_header_is_damage(head):
    with pytest.raises(ValueError, match='header'):
        parse_header(head)
