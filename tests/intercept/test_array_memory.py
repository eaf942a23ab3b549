"""``as_strided`` of an array that lies in a message of bytes."""
from chainer_fp8pipe.intercept import array_memory

import chainer.functions as F
import numpy
import pytest
from chainer.functions.array import as_strided

ORIGINAL = as_strided._get_base_array


class Owner:
    """Holds the patch as long as it lives."""


@pytest.fixture
def _held():
    owner = Owner()
    array_memory.hold(owner)
    yield
    del owner
    assert as_strided._get_base_array is ORIGINAL


def received(values):
    """The same values in the middle of a message, as a receiver has them."""
    wire = numpy.zeros(128 + values.nbytes, numpy.uint8)
    part = wire[64:64 + values.nbytes].view(values.dtype)
    part[...] = values.reshape(-1)
    return part.reshape(values.shape)


@pytest.mark.usefixtures('_held')
def test_what_came_in_a_message_is_read_as_on_its_sender():
    values = numpy.arange(6, dtype='f').reshape(2, 3)
    for offset in (0, 1, None):
        expected = F.as_strided(values, (2, 2), (2, 1), offset)
        found = F.as_strided(received(values), (2, 2), (2, 1), offset)
        numpy.testing.assert_array_equal(found.array, expected.array,
                                         strict=True)


@pytest.mark.usefixtures('_held')
def test_axes_keep_their_order_in_memory():
    values = numpy.arange(6, dtype='f').reshape(2, 3)
    found = F.as_strided(received(values).T, (4,), (1,), 0)
    assert found.array.tolist() == [0, 1, 2, 3]


def test_somebody_elses_function_is_asked_first_and_comes_back(monkeypatch):
    asked = []

    def theirs(array):
        asked.append(array.dtype)
        return ORIGINAL(array)
    monkeypatch.setattr(as_strided, '_get_base_array', theirs)
    owner = Owner()
    array_memory.hold(owner)
    found = F.as_strided(received(numpy.ones(3, 'f')), (2,), (1,), 0)
    assert found.array.tolist() == [1, 1]
    assert set(asked) == {numpy.dtype('f')}
    del owner
    assert as_strided._get_base_array is theirs


@pytest.mark.usefixtures('_held')
def test_a_part_of_an_array_is_read_as_by_chainer():
    values = numpy.arange(6, dtype='f').reshape(2, 3)
    assert F.as_strided(values[1:], (4,), (1,), 0).array.tolist() == [
        0, 1, 2, 3]
