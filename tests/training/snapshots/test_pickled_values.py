import io
import pickle

from chainer_fp8pipe.training.snapshots.pickled_values import unpickled

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import damage
from .test_plain_values import VALUES, objects, same


def program(value, protocol=4):
    """What NumPy writes after the header of an array of objects."""
    return pickle.dumps(value, protocol)


def test_that_is_what_numpy_writes():
    value, file = numpy.array(None), io.BytesIO()
    numpy.lib.format.write_array(file, value, allow_pickle=True)
    assert file.getvalue().endswith(
        tuple(program(value, protocol) for protocol in (3, 4, 5)))


@given(st.lists(VALUES, max_size=4))
def test_older_versions_values_are_read(items):
    value = objects(*items)
    same(unpickled(program(value)), value)


@pytest.mark.parametrize('protocol', [3, 4, 5])
@pytest.mark.parametrize('value', [
    numpy.array(None), numpy.array({'a': [1, (2, None)]}),
    numpy.array([[1, None], ['a', 2.5]]), numpy.array(2 ** 70)])
def test_every_protocol_is_read(value, protocol):
    same(unpickled(program(value, protocol)), value)


def test_numpys_older_names_are_read():
    """Of NumPy 1, whose modules had other names."""
    new = program(numpy.array([1, None], object), protocol=3)
    same(unpickled(new.replace(b'numpy._core.', b'numpy.core.')),
         numpy.array([1, None]))


class Recursive:
    def __reduce__(self):
        return list, ()


@pytest.mark.parametrize('value', [
    numpy.array(damage.Harmful()), numpy.array(print),
    numpy.array(Recursive()), objects({1, 2}), objects(numpy.zeros(3)),
    objects(numpy.dtype('f4')), objects(numpy.ndarray)])
def test_what_would_call_something_is_not_read(value):
    with pytest.raises(ValueError, match='pickled value is more than'):
        unpickled(program(value))
    assert not damage.HARM


@pytest.mark.parametrize('program', [
    b'', b'.', b'N.', b'\x80\x04N.', b'\x80\x04]q\x00.', b'garbage',
    # Sizes and places that are not there.
    b'\x80\x04\x8e' + (1 << 40).to_bytes(8, 'little'),
    b'\x80\x04Nr' + (1 << 31).to_bytes(4, 'little') + b'.',
    b'\x80\x04' + b'(' * 100000 + b'.', b'\x80\x04\x88\x87.',
    b'\x80\x04h\x05.', b'\x80\x04e.', b'\x80\x04b.', b'\x80\x04R.'])
def test_another_program_is_damage(program):
    with pytest.raises(ValueError, match='a pickled value is more than'):
        unpickled(program)


def test_a_list_cannot_be_used_twice():
    """Or a hundred bytes would make what no memory can hold."""
    value = []
    for _ in range(30):
        value = [value, value]
    with pytest.raises(ValueError, match='a value in two places'):
        unpickled(program(objects(value)))


def test_more_than_any_version_wrote_is_not_looked_at():
    with pytest.raises(ValueError, match='larger than any was'):
        unpickled(bytes(1 << 21))


@given(st.binary(max_size=60), st.integers(0, 200))
def test_no_program_does_anything_but_make_values(noise, place):
    whole = program(numpy.array({'a': [1, (2, None)], 'b': 0.5}))
    place %= len(whole)
    try:
        found = unpickled(whole[:place] + noise + whole[place + len(noise):])
    except ValueError:
        return
    assert found.dtype == object
