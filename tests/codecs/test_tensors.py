from chainer_fp8pipe.codecs import Tensors

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st


def make(sizes):
    arrays = [numpy.zeros(size, numpy.float32) for size in sizes]
    return Tensors([f't{i}' for i in range(len(sizes))], arrays, arrays)


@given(st.lists(st.integers(0, 7), max_size=8), st.data())
def test_overlaps_visit_every_element_of_a_range_once_in_order(sizes, data):
    tensors = make(sizes)
    start = data.draw(st.integers(0, tensors.size))
    stop = data.draw(st.integers(start, tensors.size))
    numbered = numpy.concatenate(
        [[index] * size for index, size in enumerate(sizes)] or [[]])
    places = [(index, i) for index, size in enumerate(sizes)
              for i in range(size)]
    found = []
    for index, part, place in tensors.overlaps(start, stop):
        assert part.stop - part.start == place.stop - place.start > 0
        assert place.start == len(found)
        found += [(index, i) for i in range(part.start, part.stop)]
    assert found == places[start:stop]
    assert tensors.size == len(numbered)


def test_a_fused_vector_without_tensors_is_empty_and_numpys():
    tensors = make([])
    assert tensors.size == 0
    assert tensors.xp is numpy
    assert list(tensors.overlaps(0, 0)) == []


@pytest.mark.parametrize('size', [1, 5])
def test_a_range_inside_one_tensor_gives_one_part(size):
    (overlap,) = make([3, 10, 2]).overlaps(4, 4 + size)
    assert overlap == (1, slice(1, 1 + size), slice(0, size))
