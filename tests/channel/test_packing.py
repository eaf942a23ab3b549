"""Arrays to bytes and back."""
from chainer_fp8pipe.channel.packing import pack, unpack
from chainer_fp8pipe.channel.wire import MessageLayout, describe

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst

from tests.codecs import fake_cupy
from tests.pipeline.helpers import assert_same

ARRAYS = nst.arrays(
    st.sampled_from(['f2', 'f4', 'f8', '>f4', '?', 'i1', 'u8', 'c8', 'U3',
                     'S5', 'M8[s]', 'g']),
    nst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


def variants(array):
    """The same values, otherwise laid out in memory."""
    return [array, numpy.asfortranarray(array),
            numpy.repeat(array, 2, -1)[..., ::2] if array.ndim else array,
            array[::-1] if array.ndim else array,
            # As a convolution leaves it: its own order of the axes.
            numpy.moveaxis(numpy.moveaxis(array, 0, -1).copy(), -1, 0)
            if array.ndim else array]


def cross(arrays, xp=numpy, codec=None):
    layout = MessageLayout(describe(arrays, codec))
    wire = pack(layout, arrays)
    assert wire.nbytes == layout.size
    # As it arrives: bytes, and more room than needed.
    buffer = numpy.full(layout.size + 9, 77, numpy.uint8)
    buffer[:layout.size] = numpy.frombuffer(
        wire.tobytes('A'), numpy.uint8) if layout.size else 0
    return unpack(layout, buffer, xp)


@given(st.lists(st.none() | ARRAYS, max_size=4), st.integers(0, 4))
@settings(deadline=None)
def test_any_arrays_survive_however_they_lie_in_memory(arrays, variant):
    arrays = [array if array is None else variants(array)[variant]
              for array in arrays]
    assert_same(cross(arrays), arrays)


@given(ARRAYS, st.integers(0, 4))
@settings(deadline=None)
def test_so_does_a_single_array(array, variant):
    arrays = (variants(array)[variant],)
    assert_same(cross(arrays), arrays)


@pytest.mark.parametrize('array', [
    numpy.arange(6, dtype='f2').reshape(2, 3),
    numpy.asfortranarray(numpy.arange(6, dtype='f4').reshape(2, 3)),
    numpy.array(3.0)])
def test_a_single_contiguous_array_is_sent_from_its_own_memory(array):
    array.flags.writeable = False
    layout = MessageLayout(describe((array,), None))
    assert numpy.shares_memory(pack(layout, (array,)), array)


@pytest.mark.parametrize('order', [(0, 2, 1), (1, 0, 2), (1, 2, 0),
                                   (2, 0, 1), (2, 1, 0)])
def test_the_order_of_axes_in_memory_is_kept(order):
    array = numpy.arange(24.0).reshape(2, 3, 4).transpose(order)
    for arrays in [(array,), (array, array)]:
        for found in cross(arrays):
            assert found.strides == array.strides
            numpy.testing.assert_array_equal(found, array)


def test_what_arrives_can_be_written_to():
    one, other = cross((numpy.zeros(3), numpy.zeros((2, 2), 'f4')))
    one[:], other[:] = 1, 2
    assert (one.sum(), other.sum()) == (3, 8)


@pytest.fixture(scope='module')
def modules(tmp_path_factory):
    return fake_cupy.make(tmp_path_factory.mktemp('kernels'))


@pytest.mark.parametrize('codec', [None, 'fp8'])
def test_devices_and_hosts_can_be_mixed(modules, codec):
    rng = numpy.random.default_rng(1)
    host = [rng.standard_normal((5, 4)).astype('f4'), None,
            rng.standard_normal((5, 4)).astype('f2').T,
            numpy.arange(12).reshape(3, 4)[:, ::2], numpy.zeros((0, 2))]
    wanted = cross(host, codec=codec)
    with fake_cupy.installed(modules) as cupy:
        device = [array if array is None else fake_cupy.ndarray(array)
                  for array in host]
        for sent in (device, device[:1], [device[0], *host[1:]]):
            found = cross(sent, cupy, codec)
            assert all(array is None or isinstance(array, cupy.ndarray)
                       for array in found)
            assert_same([array if array is None else array.get()
                         for array in found], wanted[:len(sent)])
            assert_same(cross(sent, numpy, codec), wanted[:len(sent)])
