"""What compiled code is told of arrays, and what it is not."""
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.compiled import can_be_read

import numpy
import pytest

from .helpers import encode, random_tensors

SIZES = [5, 0, 300]


def replaced(**arrays):
    tensors = random_tensors(SIZES)
    for kind, array in arrays.items():
        getattr(tensors, kind)[2] = array
    return tensors


@pytest.mark.parametrize('array', [
    numpy.zeros(300), numpy.zeros(600, 'f4')[::2], numpy.zeros(299, 'f4'),
    [0.0] * 300])
@pytest.mark.parametrize('kind', ['gradients', 'parameters'])
def test_other_arrays_than_float32_in_a_row_cannot_be_read(kind, array):
    assert can_be_read(random_tensors(SIZES))
    assert not can_be_read(replaced(**{kind: array}))


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


def test_a_residual_of_another_length_than_it_says_is_refused():
    codec = Fp8Ratio()
    tensors = random_tensors([8])
    encode(codec, tensors)
    state = codec.state()
    key, = (key for key in state if key.startswith('residual'))
    state[key] = state[key][:5]
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
