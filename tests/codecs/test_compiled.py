"""What compiled code is told of arrays, and what it is not."""
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.tensors import places

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import encode, random_tensors

SIZES = [5, 0, 300]


def address(array):
    return array.__array_interface__['data'][0]


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6))
def test_places_are_where_numpy_says_that_arrays_are(shapes):
    arrays = [numpy.zeros(shape, 'f4') for shape in shapes]
    assert places(arrays, writeable=True).tolist() == [
        [address(array), array.size] for array in arrays]


def swapped():
    return numpy.zeros(4, numpy.dtype('f4').newbyteorder())


@pytest.mark.parametrize('array', [
    numpy.zeros(4), numpy.zeros(4, 'i4'), numpy.zeros(8, 'f4')[::2],
    numpy.zeros((2, 2), 'f4', order='F'), swapped(), numpy.float64(3),
    numpy.frombuffer(b'0' * 17, 'f4', 4, 1), None, [0.0], 'f'])
def test_other_things_have_no_place(array):
    assert places([numpy.zeros(4, 'f4'), array]) is None


def test_what_is_read_only_has_a_place_to_read():
    array = numpy.broadcast_to(numpy.ones(3, 'f4'), (1, 3))
    assert places([array]).tolist() == [[address(array), 3]]
    assert places([array], writeable=True) is None


def replaced(**arrays):
    tensors = random_tensors(SIZES)
    for kind, array in arrays.items():
        getattr(tensors, kind)[2] = array
    return tensors


@pytest.mark.parametrize('array', [
    numpy.zeros(300), numpy.zeros(600, 'f4')[::2], numpy.zeros(299, 'f4'),
    [0.0] * 300])
@pytest.mark.parametrize('kind', ['gradients', 'parameters'])
def test_other_arrays_than_float32_in_a_row_are_not_compiled(kind, array):
    assert Cast('float32').compiled(random_tensors(SIZES), 1.0)
    assert Cast('float32').compiled(replaced(**{kind: array}), 1.0) is None


@pytest.mark.parametrize('make', [lambda: Cast('float32'), Fp8Ratio])
def test_nothing_is_compiled_for_them(make):
    codec = make()
    encode(codec, random_tensors(SIZES))
    assert codec.compiled(random_tensors(SIZES), 1.0)
    short = replaced(parameters=numpy.zeros(10, 'f4'))
    assert codec.compiled(short, 1.0) is None


def test_means_are_not_decoded_into_what_cannot_be_written():
    tensors = random_tensors(SIZES)
    made = Cast('float32').compiled(tensors, 1.0)
    assert made.decode_into(tensors.gradients)
    tensors.gradients[0].flags.writeable = False
    assert not made.decode_into(tensors.gradients)


def test_arrays_live_as_long_as_their_addresses_are_known():
    codec, tensors = Fp8Ratio(), random_tensors(SIZES)
    encode(codec, tensors)
    made = codec.compiled(tensors, 1.0)
    addresses = codec.residuals_of_means(made, tensors, 'there', (3, 100))
    kept = [array.__array_interface__['data'][0] for array in made.kept
            if array is not None and array.size]
    for column in (2, 3, 5):
        assert {made.tensors[0, column], made.tensors[2, column]} <= {*kept}
    # Of the first element, which this rank does not look after.
    assert addresses[0] + 4 * 3 in kept
    assert addresses[1] == 0
    assert addresses[2] in kept


@pytest.mark.parametrize('damage', [
    lambda array: array[:5], lambda array: array.astype('f8')])
def test_a_residual_that_is_not_what_it_says_is_refused(damage):
    codec = Fp8Ratio()
    tensors = random_tensors([8])
    encode(codec, tensors)
    state = codec.state()
    key, = (key for key in state if key.startswith('residual'))
    state[key] = damage(state[key])
    with pytest.raises(ValueError, match='damaged'):
        Fp8Ratio().load_state(state)


def test_counts_of_compiled_code_join_those_of_python():
    codec = Fp8Ratio()
    tensors = Tensors(['/x'], [numpy.ones(10, 'f4')], [numpy.ones(10, 'f4')])
    encode(codec, tensors)
    made = codec.compiled(tensors, 1.0)
    made.findings[0] = 3, 10, 1, 0
    codec.conclude(made, tensors)
    assert codec.report()['/x'].clipped == 3
    assert codec.report()['/x'].encoded == 20
    assert codec.nonfinite == ['the gradient of /x']
