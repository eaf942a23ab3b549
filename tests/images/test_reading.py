import os
import pickle

from chainer_fp8pipe.images.decoding import ImageError, create_decoder
from chainer_fp8pipe.images.file_list import find_images
from chainer_fp8pipe.images.reading import Cache, Reader, kept_bytes

import numpy
import pytest

from .folders import crop, make_folder, spoil
from .pictures import jpeg, photograph


def reader(root, kind=None, budget=10 ** 6, transform=None, seed=5,
           decoder='pillow'):
    table = find_images(root)
    cache = None if kind is None else Cache.create(len(table), budget)
    return Reader(table, transform or crop(), create_decoder(decoder), kind,
                  cache, seed)


def read(source, sample, epoch=0):
    out = numpy.zeros((3, 8, 8), numpy.uint8)
    source.read(sample, epoch, out)
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
    assert (read(one, 3, 2) == first).all()
    assert (read(one, 3, 1) != first).any()
    assert (read(reader(root, seed=6), 3, 2) != first).any()
    # Red is the sample's number, green and blue its crop.
    assert (read(one, 4, 2)[1:] != first[1:]).any()


@pytest.mark.parametrize('kind', ['memory', 'decoded'])
def test_a_cached_sample_is_read_without_its_file(root, kind):
    source, plain = reader(root, kind), reader(root)
    first = read(source, 3)
    assert (first == read(plain, 3)).all()
    expected = read(plain, 3, 1)
    os.remove(source.table.path(3))
    assert (read(source, 3, 1) == expected).all()
    with pytest.raises(FileNotFoundError):
        read(plain, 3)


@pytest.mark.parametrize('kind', ['memory', 'decoded'])
def test_a_sample_that_does_not_fit_is_read_from_its_file(root, kind):
    source = reader(root, kind)
    budget = 2 * kept_bytes(source, 0) + 32
    source = reader(root, kind, budget)
    for epoch in range(2):
        for sample in range(12):
            assert (read(source, sample, epoch)
                    == read(reader(root), sample, epoch)).all()
    assert source.cache.statistics()[0] == 2


def test_pixels_do_not_depend_on_what_the_cache_has_room_for(tmp_path):
    os.makedirs(tmp_path / 'class')
    (tmp_path / 'class' / 'photograph.jpg').write_bytes(jpeg(photograph()))
    full, ample = reader(tmp_path, 'decoded', 10), reader(tmp_path, 'decoded')
    ways = [[read(source, 0, epoch) for epoch in range(2)]
            for source in (full, ample, reader(tmp_path))]
    assert full.cache.statistics()[0] == 0
    assert ample.cache.statistics()[0] == 1
    assert numpy.array_equal(ways[0], ways[1])
    # A decoder that is asked for a part alone shrinks it otherwise.
    assert not numpy.array_equal(ways[0], ways[2])


class SizeAndDecode:
    """A user's decoder."""

    def __init__(self):
        decoder = create_decoder('pillow')
        self.size, self.decode = decoder.size, decoder.decode


@pytest.mark.parametrize('kind', [None, 'memory', 'decoded'])
def test_a_users_decoder_needs_size_and_decode_only(root, kind):
    source, plain = reader(root, kind), reader(root)
    source.decoder = SizeAndDecode()
    for _ in range(2):
        assert (read(source, 3) == read(plain, 3)).all()


@pytest.mark.parametrize('kind', [None, 'memory', 'decoded'])
def test_without_a_transform_it_is_the_whole_image(root, kind):
    source = reader(root, kind)
    source.transform = None
    for _ in range(2):
        image = source.draw(4, numpy.random.default_rng(0))
        assert image.shape == (3, 24, 20)
        assert image.dtype == numpy.uint8
        assert (image[0] == 4).all()
        assert image.flags.c_contiguous


@pytest.mark.parametrize('kind', [None, 'memory', 'decoded'])
def test_an_error_names_the_file_and_can_be_sent(root, kind):
    source = reader(root, kind)
    path = source.table.path(3)
    spoil(path)
    for _ in range(2):
        with pytest.raises(ImageError) as caught:
            read(source, 3)
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == f'{path}: {error.reason}'
        assert error.path == path
