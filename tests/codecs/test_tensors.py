from chainer_fp8pipe.codecs import Tensors

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st


def make(sizes, grain=1):
    arrays = [numpy.zeros(size, numpy.float32) for size in sizes]
    return Tensors([f't{i}' for i in range(len(sizes))], arrays, arrays,
                   grain=grain)


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


@given(st.lists(st.integers(0, 70), max_size=6), st.sampled_from([3, 32]),
       st.data())
def test_entries_of_several_elements_are_not_shared_by_tensors(sizes, grain,
                                                               data):
    tensors = make(sizes, grain)
    entries = [(index, range(first, min(first + grain, size)))
               for index, size in enumerate(sizes)
               for first in range(0, size, grain)]
    assert tensors.size == len(entries)
    start = data.draw(st.integers(0, tensors.size))
    stop = data.draw(st.integers(start, tensors.size))
    found = []
    for index, part, place in tensors.overlaps(start, stop):
        assert place.start == len(found)
        found += [(index, range(first, min(first + grain, part.stop)))
                  for first in range(part.start, part.stop, grain)]
        assert place.stop == len(found)
    assert found == entries[start:stop]
    for index, size in enumerate(sizes):
        wanted = [i for tensor, part in entries[start:stop]
                  if tensor == index for i in part]
        assert [*range(size)[tensors.elements(index, start, stop)]] == wanted
