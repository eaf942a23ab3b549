"""Tensors laid end to end, and what compiled code is told of arrays."""
from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.codecs.tensors import places

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import random_tensors

SIZES = [5, 0, 300]


def address(array):
    return array.__array_interface__['data'][0]


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6))
def test_places_are_where_numpy_says_that_arrays_are(shapes):
    arrays = [numpy.zeros(shape, 'f4') for shape in shapes]
    assert places(arrays, writeable=True).tolist() == [
        [address(array), array.size] for array in arrays]


@pytest.mark.parametrize('array', [
    numpy.zeros(4), numpy.zeros(4, 'i4'), numpy.zeros(8, 'f4')[::2],
    numpy.zeros((2, 2), 'f4', order='F'),
    numpy.zeros(4, numpy.dtype('f4').newbyteorder()), numpy.float64(3),
    numpy.frombuffer(b'0' * 17, 'f4', 4, 1), None, [0.0], 'f'])
def test_other_things_have_no_place(array):
    assert places([numpy.zeros(4, 'f4'), array]) is None


def test_what_is_read_only_has_a_place_to_read():
    array = numpy.broadcast_to(numpy.ones(3, 'f4'), (1, 3))
    assert places([array]).tolist() == [[address(array), 3]]
    assert places([array], writeable=True) is None


@pytest.mark.parametrize('array', [
    numpy.zeros(300), numpy.zeros(600, 'f4')[::2], numpy.zeros(299, 'f4'),
    numpy.zeros(10, 'f4')])
@pytest.mark.parametrize('kind', ['gradients', 'parameters'])
@pytest.mark.parametrize('codec', [Cast('float32'), Fp8Ratio()])
def test_other_arrays_than_float32_in_a_row_are_refused(codec, kind, array):
    tensors = random_tensors(SIZES)
    getattr(tensors, kind)[2] = array
    with pytest.raises(ValueError, match='float32|differ in size'):
        codec.step(codec.init(), tensors)


def test_means_are_not_decoded_into_what_cannot_be_written():
    codec, tensors = Cast('float32'), random_tensors(SIZES)
    codec.step(codec.init(), tensors)
    tensors.decode_into(tensors.gradients)
    tensors.gradients[0].flags.writeable = False
    with pytest.raises(ValueError, match='writeable'):
        tensors.decode_into(tensors.gradients)
