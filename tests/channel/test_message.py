"""Arrays as the bytes of a message, and the description that goes with it."""
from chainer_fp8pipe.channel.message import (
    MessageLayout,
    Spec,
    crosses_as,
    decode_specs,
    describe,
    encode_specs,
    pack,
    unpack,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst

from tests.codecs import fake_cupy
from tests.pipeline.helpers import assert_same

DTYPES = ['<f2', '<f4', '<f8', '>f4', '|b1', '|i1', '<u8', '<c8', '<U3',
          '|S5', '<M8[ns]']


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 2 ** 40), max_size=6)))
    order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
    repeated = draw(st.sets(st.sampled_from(range(len(shape))))
                    if shape else st.just(()))
    return Spec(shape, draw(st.sampled_from(DTYPES)), order or None,
                draw(st.booleans()), tuple(sorted(repeated)))


@given(st.lists(st.none() | specs(), max_size=8).map(tuple))
def test_specs_survive_their_bytes(wanted):
    assert decode_specs(encode_specs(wanted)) == wanted


def test_a_description_is_plain_text():
    arrays = (numpy.zeros((3, 5), numpy.float16), None)
    assert encode_specs(describe(arrays, None)) == (
        b'[[[3, 5], "<f2", null, false, []], null]')


@pytest.mark.parametrize(('array', 'order'), [
    (numpy.zeros((2, 3, 4)), None),
    (numpy.zeros((2, 3, 4)).T, (2, 1, 0)),
    (numpy.zeros((2, 3, 4)).transpose(0, 2, 1), (0, 2, 1)),
    (numpy.zeros((2, 3, 4)).transpose(1, 2, 0), (2, 0, 1)),
    (numpy.zeros((2, 3, 8))[..., ::2], None),
    (numpy.zeros((2, 3))[::-1], None),
    (numpy.broadcast_to(numpy.zeros(3), (2, 3)), None),
    (numpy.zeros((0, 3)).T, None),
    (numpy.zeros(()), None),
])
def test_the_order_of_axes_is_the_one_in_memory(array, order):
    (spec,) = describe([array], None)
    assert spec.order == order


def test_arrays_start_at_64_bytes_and_do_not_overlap():
    arrays = [numpy.zeros(5, 'f4'), None, numpy.zeros((0, 3)),
              numpy.array(1, 'i2'), numpy.zeros((3, 7), 'f8')]
    layout = MessageLayout(describe(arrays, None))
    assert layout.places == [slice(0, 20), slice(20, 20), slice(20, 20),
                             slice(64, 66), slice(128, 296)]
    assert layout.size == 296


def test_fp8_takes_one_byte_per_float_and_four_per_array():
    arrays = [numpy.zeros((3, 5), 'f4'), numpy.zeros(7, 'f2'),
              numpy.zeros((2, 2)), numpy.zeros(3, 'i4'),
              numpy.zeros(3, 'c8'), numpy.zeros((4, 0), 'f4')]
    layout = MessageLayout(describe(arrays, 'fp8'))
    assert [place.stop - place.start for place in layout.places] == [
        4 + 15, 4 + 7, 4 + 4, 12, 24, 0]


@pytest.mark.parametrize(('arrays', 'same'), [
    ((numpy.ones((2, 3), 'f4'), None), True),
    ((numpy.ones((4, 6), 'f4')[::2, ::2], None), True),
    ((numpy.zeros((2, 3), 'f4', order='F'), None), False),
    ((numpy.zeros((3, 2), 'f4'), None), False),
    ((numpy.zeros((2, 3), 'i4'), None), False),
    ((None, numpy.zeros((2, 3), 'f4')), False),
    ((numpy.zeros((2, 3), 'f4'),), False),
    ((numpy.zeros((2, 3), 'f4'), numpy.zeros(1)), False),
    ((3.0, None), False),
])
def test_a_layout_knows_what_it_fits(arrays, same):
    layout = MessageLayout(describe((numpy.zeros((2, 3), 'f4'), None), None))
    assert layout.fits(arrays) is same


@pytest.mark.parametrize(('bad', 'name'), [
    (3.0, 'float'), ([1.0], 'list'), ('text', 'str')])
def test_something_that_is_no_array_is_named(bad, name):
    with pytest.raises(TypeError, match=f'array 1 of a message.*{name}'):
        describe((numpy.zeros(2), bad), None)


@pytest.mark.parametrize('dtype', [object, [('a', 'f4')]])
def test_dtypes_that_are_more_than_plain_elements_are_refused(dtype):
    with pytest.raises(TypeError, match='dtype .*cannot be sent'):
        describe((numpy.zeros(2, dtype),), None)


def test_specs_tell_the_codec_that_made_them():
    for arrays in [(numpy.zeros(2, 'f4'), None), (numpy.zeros(2, 'f2'),)]:
        for codec in (None, 'fp8'):
            for other in (None, 'fp8'):
                made = describe(arrays, codec)
                assert crosses_as(made, other) == (codec == other)
    assert crosses_as(describe((numpy.zeros(2, 'i4'),), None), 'fp8')


# --- to bytes and back

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
def test_any_arrays_survive_however_they_lie_in_memory(arrays, variant):
    arrays = [array if array is None else variants(array)[variant]
              for array in arrays]
    assert_same(cross(arrays), arrays)


@given(ARRAYS, st.integers(0, 4))
def test_a_single_array_survives(array, variant):
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


@given(nst.arrays('f4', nst.array_shapes(max_dims=4, max_side=3),
                  elements=st.floats(-2, 2, width=32)), st.data())
def test_numbers_that_are_repeated_in_memory_cross_once(array, data):
    """Sums over what is computed of them keep their order of rounding."""
    order = data.draw(st.permutations(range(array.ndim)))
    wanted = numpy.broadcast_to(array, tuple(
        data.draw(st.sampled_from([2, 5])) if length == 1 else length
        for length in array.shape)).transpose(order)
    for codec in None, 'fp8':
        layout = MessageLayout(describe((wanted,), codec))
        assert layout.size == array.size * (1 if codec else 4) + (
            4 if codec else 0)
        found, = cross((wanted,), codec=codec)
        assert [stride for stride, length in zip(
            found.strides, found.shape, strict=True) if length > 1] == [
            stride for stride, length in zip(
                wanted.strides, wanted.shape, strict=True) if length > 1]
        if codec is None:
            numpy.testing.assert_array_equal(found, wanted)


def test_what_arrives_can_be_written_to():
    one, other = cross((numpy.zeros(3), numpy.zeros((2, 2), 'f4')))
    one[:], other[:] = 1, 2
    assert (one.sum(), other.sum()) == (3, 8)


@pytest.mark.parametrize('codec', [None, 'fp8'])
def test_devices_and_hosts_can_be_mixed(codec):
    rng = numpy.random.default_rng(1)
    host = [rng.standard_normal((5, 4)).astype('f4'), None,
            rng.standard_normal((5, 4)).astype('f2').T,
            numpy.arange(12).reshape(3, 4)[:, ::2], numpy.zeros((0, 2))]
    wanted = cross(host, codec=codec)
    with fake_cupy.installed() as cupy:
        device = [array if array is None else fake_cupy.ndarray(array)
                  for array in host]
        for sent in (device, device[:1], [device[0], *host[1:]]):
            found = cross(sent, cupy, codec)
            assert all(array is None or isinstance(array, cupy.ndarray)
                       for array in found)
            assert_same([array if array is None else array.get()
                         for array in found], wanted[:len(sent)])
            assert_same(cross(sent, numpy, codec), wanted[:len(sent)])
