"""Ghosts of arrays on a device, with a stand-in for CuPy."""
import types

from chainer_fp8pipe.chains.ghost import GhostError, ghost, is_ghost
from chainer_fp8pipe.planning.calls import Source

import numpy as np
import pytest


class DeviceArray:
    """What CuPy's arrays have that a ghost needs."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.ndim, self.filled = len(self.shape), None

    def fill(self, value):
        self.filled = value

    def view(self, array_class):
        made = array_class.__new__(array_class)
        DeviceArray.__init__(made, self.shape, self.dtype)
        return made

    def sum(self):
        raise AssertionError('computed on the device')


def broadcast_to(array, shape):
    assert array.shape == ()        # one element for all indices
    assert array.filled is not None
    return DeviceArray(shape, array.dtype)


device = types.SimpleNamespace(
    ndarray=DeviceArray, empty=DeviceArray, broadcast_to=broadcast_to)


def test_a_ghost_has_the_class_shape_and_dtype_of_its_device_s_arrays():
    made = ghost((3, 4), 'f', Source(7, 0), device)
    assert isinstance(made, DeviceArray)
    assert is_ghost(made)
    assert (made.shape, made.dtype, made.ndim) == ((3, 4), np.float32, 2)
    assert made.source == Source(7, 0)


@pytest.mark.parametrize('look', [
    bool, float, lambda array: array.get(), lambda array: array.item(),
    lambda array: array.data, list])
def test_a_look_at_the_data_is_an_error_as_for_arrays_of_numpy(look):
    with pytest.raises(GhostError, match='test_ghost_device.py:'):
        look(ghost((1,), 'f', Source(7, 0), device))
