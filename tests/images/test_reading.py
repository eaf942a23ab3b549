"""Samples and their cache, in one process and in several."""
import os

from chainer_fp8pipe.images import ImageError, ImageFolder
from chainer_fp8pipe.images.cache import Cache

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .folders import crop, make_folder


def reader(root, cache=None, seed=5, transform=None):
    return ImageFolder(root, transform or crop(), cache, seed=seed)


def read(source, sample, epoch=0):
    out = numpy.zeros((3, 8, 8), numpy.uint8)
    source.read(sample, (epoch, sample), out)
    return out


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root')


def test_random_numbers_depend_on_seed_epoch_and_sample_alone(root):
    one, other = reader(root), reader(root)
    first = read(one, 3, 2)
    read(one, 4, 2)
    read(other, 7, 0)
    assert (read(other, 3, 2) == first).all()
    assert (read(one, 3, 1) != first).any()
    assert (read(reader(root, seed=6), 3, 2) != first).any()
    # Red is the sample's number, green and blue its crop.
    assert (read(one, 4, 2)[1:] != first[1:]).any()


def test_a_cached_sample_is_read_without_its_file_and_others_from_theirs(
        root):
    plain = reader(root)
    size = max(os.path.getsize(plain.path(n)) for n in range(12))
    source = reader(root, 2 * size)
    expected = [[read(plain, sample, epoch) for sample in range(12)]
                for epoch in range(3)]
    for epoch in range(2):
        assert numpy.array_equal([read(source, sample, epoch)
                                  for sample in range(12)], expected[epoch])
    for sample in range(12):
        os.remove(source.path(sample))
    assert (read(source, 1, 2) == expected[2][1]).all()
    for of, sample in (source, 5), (plain, 1):
        with pytest.raises(ImageError, match='FileNotFoundError'):
            read(of, sample)


class OwnCrop(type(crop())):
    """Returns what it is told, in place of ``out``."""

    def __init__(self, change):
        super().__init__(8, normalise=None)
        self.change = change

    def finish(self, pixels, out=None):
        return self.change(super().finish(pixels))


def test_what_a_transform_returns_counts(root):
    expected = read(reader(root), 3)
    for change in (lambda x: 255 - x, lambda x: x[:, ::-1], lambda x: x):
        source = reader(root, transform=OwnCrop(change))
        assert (read(source, 3) == change(expected)).all()


@pytest.mark.parametrize(('change', 'message'), [
    (lambda x: x[:1], r'array of \(1, 8, 8\), but .*\(3, 8, 8\)'),
    (lambda x: None, r'array of \(\), but'),
    (lambda x: x / 2, 'TypeError: .*float64.*uint8')])
def test_a_result_that_is_not_as_the_transform_says_is_an_error(
        root, change, message):
    with pytest.raises(ImageError, match=message):
        read(reader(root, transform=OwnCrop(change)), 3)


# --- the cache

@settings(max_examples=100)
@given(budget=st.integers(0, 300),
       sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_nothing_is_evicted_and_the_budget_is_kept(budget, sizes):
    cache = Cache.create(len(sizes), budget)
    kept = {}
    for index, size in enumerate(sizes):
        data = bytes([index + 1]) * size
        cache.put(index, data)
        if sum(map(len, kept.values())) + size <= budget:
            kept[index] = data
    assert [cache.get(index) for index in range(len(sizes))] == [
        kept.get(index) for index in range(len(sizes))]


def test_only_the_same_memory_is_opened():
    cache, other = Cache.create(2, 100), Cache.create(2, 100)
    pid, fd, *file = cache.place
    assert Cache.open((pid, fd, *file), 2)
    for fd in other.place[1], 99999:
        assert Cache.open((pid, fd, *file), 2) is None
