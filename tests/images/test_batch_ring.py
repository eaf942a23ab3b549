from chainer_fp8pipe.images.segment import Segment
from chainer_fp8pipe.images.worker import BatchRing, RingLayout

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def arrays(slot):
    return [slot.epoch, slot.indices, slot.outcomes, slot._messages,
            slot.images]


@settings(max_examples=50)
@given(slots=st.integers(1, 4), capacity=st.integers(1, 9),
       side=st.integers(1, 20),
       dtype=st.sampled_from(['uint8', 'float16', 'float32']))
def test_no_two_arrays_of_a_ring_share_a_byte(slots, capacity, side, dtype):
    layout = RingLayout(
        slots, capacity, (3, side, 2 * side), numpy.dtype(dtype))
    ring = BatchRing(Segment.create(layout.total_bytes), layout)
    found = [ring.generation]
    for number in range(slots):
        found += arrays(ring[number])
    ranges = sorted((array.ctypes.data, array.ctypes.data + array.nbytes)
                    for array in found)
    assert all(stop <= start for (_, stop), (start, _)
               in zip(ranges, ranges[1:], strict=False))
    assert ranges[-1][1] - ranges[0][0] <= layout.total_bytes
    assert ring[0].images.shape == (capacity, 3, side, 2 * side)
    for array in found:
        assert array.ctypes.data % array.dtype.alignment == 0


@pytest.mark.parametrize('text', ['', 'short', 'ä' * 100])
def test_a_message_is_read_back(text):
    layout = RingLayout(1, 2, (3, 2, 2), numpy.dtype('u1'))
    slot = BatchRing(Segment.create(layout.total_bytes), layout)[0]
    slot.set_message(1, 'something longer that was here before' * 9)
    slot.set_message(1, text)
    assert slot.message(1) == text
    assert slot.message(0) == ''


def test_a_long_message_keeps_its_end():
    layout = RingLayout(1, 1, (3, 2, 2), numpy.dtype('u1'))
    slot = BatchRing(Segment.create(layout.total_bytes), layout)[0]
    slot.set_message(0, 'x' * 5000 + 'KeyError')
    assert slot.message(0).endswith('xxKeyError')
