"""Tensors laid end to end are arrays that compiled code can use."""
from chainer_fp8pipe.codecs import Cast, Fp8Ratio

import numpy
import pytest

from .helpers import random_tensors

SIZES = [5, 0, 300]


@pytest.mark.parametrize('array', [
    numpy.zeros(300), numpy.zeros(300, 'i4'), numpy.zeros(600, 'f4')[::2],
    numpy.zeros((2, 150), 'f4', order='F'),
    numpy.zeros(300, numpy.dtype('f4').newbyteorder()), numpy.float64(3),
    numpy.frombuffer(b'0' * 1201, 'f4', 300, 1), None, [0.0], 'f',
    numpy.zeros(299, 'f4'), numpy.zeros(10, 'f4')])
@pytest.mark.parametrize('kind', ['gradients', 'parameters'])
@pytest.mark.parametrize('codec', [Cast('float32'), Fp8Ratio()])
def test_other_arrays_than_float32_in_a_row_are_refused(codec, kind, array):
    tensors = random_tensors(SIZES)
    getattr(tensors, kind)[2] = array
    with pytest.raises(ValueError, match='float32|differ in size'):
        codec.step(codec.init(), tensors)


def test_means_are_not_decoded_into_what_cannot_be_written():
    codec, tensors = Cast('float32'), random_tensors(SIZES)
    tensors.parameters[0].flags.writeable = False       # it is only read
    codec.step(codec.init(), tensors)
    tensors.decode_into(tensors.gradients)
    tensors.gradients[0].flags.writeable = False
    with pytest.raises(ValueError, match='writeable'):
        tensors.decode_into(tensors.gradients)
