import os

from chainer_fp8pipe.images.bad_image import ImageError
from chainer_fp8pipe.images.cache import Cache
from chainer_fp8pipe.images.decoding.decode import create_decoder
from chainer_fp8pipe.images.file_list import find_images
from chainer_fp8pipe.images.jpeg.jpeg_index import JpegIndex
from chainer_fp8pipe.images.reading import Reader, kept_bytes

import numpy
import pytest

from .folders import crop, make_folder, spoil
from .pictures import jpeg, photograph
from .turbo import needs_turbo


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


@pytest.fixture
def photographs(tmp_path):
    """A folder of three; the second one's codes have no index."""
    (tmp_path / 'class').mkdir()
    for number in range(3):
        (tmp_path / 'class' / f'{number}.jpg').write_bytes(jpeg(
            photograph()[:200 + number, :300], progressive=number == 1))
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """How often files are read to be indexed, and parts are cut out."""
    found = {'of': 0, 'cut': 0}

    def counted(name):
        true = getattr(JpegIndex, name)

        def call(*arguments):
            found[name] += 1
            return true(*arguments)
        return call
    monkeypatch.setattr(JpegIndex, 'of', counted('of'))
    monkeypatch.setattr(JpegIndex, 'cut', counted('cut'))
    return found


def index_of(source, sample):
    with open(source.table.path(sample), 'rb') as file:
        return JpegIndex.of(file.read())


@needs_turbo
def test_an_index_is_made_once_and_used_from_then_on(photographs, calls):
    source = reader(photographs, 'memory', decoder='turbojpeg')
    plain = reader(photographs, decoder='turbojpeg')
    for epoch in range(4):
        for sample in range(3):
            assert (read(source, sample, epoch)
                    == read(plain, sample, epoch)).all()
    assert calls == {'of': 3, 'cut': 4 * 2}
    assert bytes(source.cache.get(0).extra) == index_of(source, 0).data
    assert source.cache.get(1).extra == b''


@needs_turbo
def test_a_file_that_is_not_kept_is_not_indexed(photographs, calls):
    source = reader(photographs, 'memory', 100, decoder='turbojpeg')
    for epoch in range(2):
        read(source, 0, epoch)
    assert calls == {'of': 0, 'cut': 0}


@needs_turbo
@pytest.mark.parametrize('missing', [0, 1])
def test_a_file_is_kept_without_its_index_rather_than_not_at_all(
        photographs, missing):
    budget = kept_bytes(reader(photographs, 'memory', decoder='turbojpeg'), 0)
    source = reader(photographs, 'memory', budget - missing,
                    decoder='turbojpeg')
    first = read(source, 0)
    assert len(source.cache.get(0).extra) == (
        0 if missing else len(index_of(source, 0).data))
    os.remove(source.table.path(0))
    assert (read(source, 0) == first).all()


@needs_turbo
def test_an_index_that_another_ranks_decoder_made_is_not_in_the_way(
        photographs):
    source = reader(photographs, 'memory', decoder='turbojpeg')
    other = reader(photographs, decoder='pillow')
    expected = read(other, 0)
    read(source, 0)
    other.cache, other.kind = source.cache, 'memory'
    os.remove(source.table.path(0))
    assert (read(other, 0) == expected).all()


class SizeAndDecode:
    """A user's decoder, which knows no indices."""

    def __init__(self):
        decoder = create_decoder('pillow')
        self.size, self.decode = decoder.size, decoder.decode


@needs_turbo
def test_a_users_decoder_needs_size_and_decode_only(photographs):
    source = reader(photographs, 'memory', decoder='turbojpeg')
    other = Reader(source.table, crop(), SizeAndDecode(), 'memory',
                   source.cache, 5)
    read(source, 0)     # is in the cache with an index
    plain = reader(photographs, decoder='pillow')
    for sample in range(3):
        assert (read(other, sample) == read(plain, sample)).all()


@needs_turbo
def test_reading_whole_images_makes_no_index(photographs, calls):
    table = find_images(photographs)
    for kind, transform in ('memory', None), ('decoded', crop()):
        source = Reader(table, transform, create_decoder('turbojpeg'), kind,
                        Cache.create(3, 10 ** 7), 0)
        for _ in range(2):
            source.draw(0, numpy.random.default_rng(0))
    assert calls == {'of': 0, 'cut': 0}


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
def test_an_error_names_the_file(root, kind):
    source = reader(root, kind)
    spoil(source.table.path(3))
    for _ in range(2):
        with pytest.raises(ImageError) as caught:
            read(source, 3)
        assert caught.value.path == source.table.path(3)


@needs_turbo
def test_kept_bytes_counts_the_index(photographs):
    source = reader(photographs, 'memory', decoder='turbojpeg')
    sizes = [os.path.getsize(source.table.path(k)) for k in range(2)]
    # Photographs of 300 x 200 pixels: 10 groups in each of 13 rows of units.
    assert kept_bytes(source, 0) == sizes[0] + 12 * (10 * 13 + 2)
    assert kept_bytes(source, 1) == sizes[1]
    plain = reader(photographs, 'memory', decoder='turbojpeg-whole')
    assert kept_bytes(plain, 0) == sizes[0]


def test_kept_bytes_counts_the_file_or_the_pixels(root):
    source = reader(root, 'memory')
    assert kept_bytes(source, 0) == os.path.getsize(source.table.path(0))
    assert kept_bytes(reader(root, 'decoded'), 0) == 3 * 24 * 20
    spoil(source.table.path(0))
    assert kept_bytes(reader(root, 'decoded'), 0) == 0
