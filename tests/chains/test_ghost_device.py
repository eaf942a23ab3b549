"""Ghosts of arrays on a device, with a stand-in for CuPy."""
import types

from chainer_fp8pipe.chains.ghost import GhostError, ghost, is_ghost
from chainer_fp8pipe.planning.calls import Source

import numpy as np
import pytest


class DeviceArray:
    """Never made: a ghost takes no memory of the device."""

    def __init__(self, *_):
        raise AssertionError('made on the device')


device = types.SimpleNamespace(
    ndarray=DeviceArray, cuda=types.SimpleNamespace(Device=lambda: 'gpu'))


def test_a_ghost_has_the_class_shape_and_dtype_of_its_device_s_arrays():
    made = ghost((3, 4), 'f', Source(7, 0), device)
    assert isinstance(made, DeviceArray)
    assert not isinstance(made, np.ndarray)
    assert is_ghost(made)
    assert (made.shape, made.dtype, made.ndim) == ((3, 4), np.float32, 2)
    assert (made.source, made.device) == (Source(7, 0), 'gpu')


@pytest.mark.parametrize('look', [
    bool, float, lambda array: array.get(), lambda array: array.item(),
    lambda array: array.data, list])
def test_a_look_at_the_data_is_an_error_as_for_arrays_of_numpy(look):
    with pytest.raises(GhostError, match='test_ghost_device.py:'):
        look(ghost((1,), 'f', Source(7, 0), device))
