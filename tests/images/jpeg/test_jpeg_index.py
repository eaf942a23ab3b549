import io

from chainer_fp8pipe.images.bad_image import ImageError
from chainer_fp8pipe.images.decoding.decode import create_decoder
from chainer_fp8pipe.images.jpeg.jpeg_index import SPACING, JpegIndex
from chainer_fp8pipe.images.transforms import Crop

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.images.pictures import jpeg, photograph, png
from tests.images.turbo import (
    ARITHMETIC,
    RESTART_ROWS,
    SUBSAMPLINGS,
    boxes,
    decoded,
    needs_turbo,
    turbo_jpeg,
)


def pixels_of(data):
    return numpy.asarray(Image.open(io.BytesIO(data)))


def assert_same_pixels(part, encoded, box):
    """Pillow finds in a part what it finds in the whole."""
    left, top, width, height = box
    x, y, w, h = part.box
    assert (w, h) == (width, height)
    small = pixels_of(part.data)
    assert small.shape[:2] == (part.height, part.width)
    numpy.testing.assert_array_equal(
        small[y:y + h, x:x + w],
        pixels_of(encoded)[top:top + height, left:left + width])


def some_photograph(draw):
    width, height = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    left, top = draw(st.integers(0, 400)), draw(st.integers(0, 250))
    return photograph()[top:top + height, left:left + width]


def noise(height, width):
    """As far as pixels can be from each other."""
    return numpy.random.default_rng(0).integers(
        0, 2, (height, width, 3), numpy.uint8) * 255


@needs_turbo
@pytest.mark.parametrize('subsampling', SUBSAMPLINGS)
@settings(max_examples=60)
@given(st.data())
def test_a_part_has_the_very_pixels_of_the_whole(subsampling, data):
    pixels = some_photograph(data.draw)
    height, width = pixels.shape[:2]
    encoded = turbo_jpeg(pixels, subsampling, data.draw(st.integers(1, 100)),
                         data.draw(st.booleans()))
    box = data.draw(boxes(width, height))
    shrink = data.draw(st.sampled_from([1, 2, 4, 8]))
    part = JpegIndex.of(encoded).cut(encoded, box, shrink)
    assert part.width <= width
    assert part.height <= height
    numpy.testing.assert_array_equal(
        decoded(*part, shrink), decoded(encoded, width, height, box, shrink))


@needs_turbo
@pytest.mark.parametrize('subsampling', ['4:4:4', '4:2:2', '4:2:0', '4:4:0'])
@pytest.mark.parametrize('shrink', [1, 2, 4, 8])
def test_a_part_at_the_edge_is_upsampled_like_the_whole_however_narrow(
        subsampling, shrink):
    for width in range(SPACING - 2, SPACING + 22):
        encoded = turbo_jpeg(photograph()[200:230, 300:300 + width],
                             subsampling)
        index = JpegIndex.of(encoded)
        for columns in (1, 2, 3, 5, 9):
            box = (width - columns, 5, columns, 20)
            numpy.testing.assert_array_equal(
                decoded(*index.cut(encoded, box, shrink), shrink),
                decoded(encoded, width, 30, box, shrink))


@settings(max_examples=100)
@given(st.data())
def test_pillow_finds_the_same_pixels_in_it(data):
    pixels = some_photograph(data.draw)
    options = data.draw(st.sampled_from([
        {'subsampling': '4:4:4'}, {'subsampling': '4:2:0'}, {'mode': 'L'},
        {'keep_rgb': True}, {'comment': b'a comment'}, {'exif': b'Exif..'},
        {'subsampling': '4:2:2', 'icc_profile': bytes(100)},
        {'qtables': [[1] * 64]}, {'qtables': [[255] * 64] * 2}]))
    encoded = jpeg(pixels, optimize=data.draw(st.booleans()), **options)
    box = data.draw(boxes(pixels.shape[1], pixels.shape[0]))
    assert_same_pixels(JpegIndex.of(encoded).cut(encoded, box, 1), encoded,
                       box)


@pytest.mark.parametrize('options', [
    {}, {'subsampling': '4:4:4', 'quality': 100}, {'mode': 'L'},
    {'optimize': True, 'quality': 20}], ids=str)
def test_a_cut_of_the_whole_image_is_the_file_without_metadata(options):
    encoded = jpeg(photograph(), exif=b'Exif' + bytes(1000), **options)
    box = 0, 0, 640, 427
    part = JpegIndex.of(encoded).cut(encoded, box, 1)
    assert part[1:] == (640, 427, box)
    start = encoded.rindex(b'\xff\xda')
    assert part.data.endswith(encoded[start:])
    assert b'Exif' not in part.data
    assert_same_pixels(part, encoded, box)


def test_a_part_is_not_larger_than_it_must_be():
    encoded = jpeg(photograph(), subsampling='4:4:4')
    part = JpegIndex.of(encoded).cut(encoded, (98, 98, 60, 60), 1)
    assert (part.width, part.height) == (2 * SPACING, 64)
    assert part.box == (2, 2, 60, 60)
    # Two pixels more on each side, for the upsampling, and no more.
    part = JpegIndex.of(encoded).cut(encoded, (97, 97, 60, 60), 1)
    assert (part.width, part.height) == (3 * SPACING, 72)


@pytest.mark.parametrize('size', [(1, 1), (8, 8), (9, 1), (16, 16), (17, 3)])
def test_the_smallest_images_have_an_index(size):
    encoded = jpeg(photograph()[:size[1], :size[0]])
    index = JpegIndex.of(encoded)
    assert index.size == size
    box = 0, 0, *size
    assert_same_pixels(index.cut(encoded, box, 1), encoded, box)


def test_codes_of_the_greatest_differences_are_made_and_read():
    # Optimised codes are for the sizes of differences that the image has: no
    # large ones between its columns; between its rows cut short there are.
    pixels = numpy.zeros((16, 480, 3), numpy.uint8)
    pixels[:] = numpy.linspace(0, 255, 480).astype('u1')[:, None]
    pixels = numpy.concatenate([pixels, pixels[:, ::-1]] * 6)
    for quality in 100, 50:
        encoded = jpeg(pixels, optimize=True, quality=quality,
                       subsampling='4:4:4')
        box = 34, 0, 40, 192
        part = JpegIndex.of(encoded).cut(encoded, box, 1)
        assert part.width < 480
        assert_same_pixels(part, encoded, box)


def test_noise_in_which_many_bytes_are_stuffed():
    encoded = jpeg(noise(200, 200), quality=100, subsampling='4:4:4')
    assert encoded.count(b'\xff\x00') > 100
    box = 50, 60, 90, 70
    assert_same_pixels(JpegIndex.of(encoded).cut(encoded, box, 1), encoded,
                       box)


def test_factors_of_a_single_component_mean_nothing():
    encoded = bytearray(jpeg(photograph(), mode='L'))
    frame = encoded.index(b'\xff\xc0')
    assert encoded[frame + 11] == 0x11
    encoded[frame + 11] = 0x22
    encoded = bytes(encoded)
    box = 300, 200, 99, 99
    assert_same_pixels(JpegIndex.of(encoded).cut(encoded, box, 1), encoded,
                       box)


def segment_of(data, marker):
    """Where a segment of a JPEG begins, and ends."""
    start = data.index(bytes([0xFF, marker]))
    return start, start + 2 + int.from_bytes(data[start + 2:start + 4], 'big')


def one_component(data):
    """As if there were a scan for each component."""
    start, end = segment_of(data, 0xDA)
    return data[:start] + bytes.fromhex('ffda000801010000 3f00') + data[end:]


def with_restarts(data):
    start, _ = segment_of(data, 0xDA)
    return data[:start] + bytes.fromhex('ffdd00040004') + data[start:]


def without_a_table(data):
    start, end = segment_of(data, 0xC4)
    return data[:start] + data[end:]


SMALL = jpeg(photograph()[:40, :50])


@pytest.mark.parametrize('data', [
    b'', b'\xff\xd8', b'no image', png(photograph()[:16, :16]),
    jpeg(photograph(), progressive=True),
    jpeg(photograph(), mode='CMYK'),
    jpeg(photograph(), restart_marker_rows=1),
    SMALL[:-2], SMALL[:-40], SMALL[:-2] + b'..\xff\xd9', SMALL[:300],
    SMALL.replace(b'\xff\xc0', b'\xff\xc9'),
    SMALL.replace(b'\xff\xc0\x00\x11\x08', b'\xff\xc1\x00\x11\x0c'),
    one_component(SMALL), with_restarts(SMALL), without_a_table(SMALL),
    SMALL[:-50] + b'\xff\xd0' + SMALL[-48:],
    SMALL[:-2] + b'\xff\xfe\x00\x02\xff\xd9',
], ids=['empty', 'start', 'text', 'PNG', 'progressive', 'CMYK', 'restarts',
        'no end', 'cut short', 'more than codes', 'header cut short',
        'arithmetic', '12 bits', 'several scans', 'restarts announced',
        'no table', 'marker', 'marker behind'])
def test_an_unusual_or_damaged_jpeg_has_no_index(data):
    assert JpegIndex.of(data) is None


@needs_turbo
@pytest.mark.parametrize('parameter', [ARITHMETIC, RESTART_ROWS])
def test_arithmetic_codes_and_restart_markers_have_no_index(parameter):
    assert JpegIndex.of(turbo_jpeg(photograph(), more=[parameter])) is None
    assert JpegIndex.of(turbo_jpeg(photograph()))


def test_a_small_file_that_claims_a_large_image_takes_no_memory():
    data = bytearray(SMALL)
    frame = data.index(b'\xff\xc0')
    data[frame + 5:frame + 9] = b'\xff\x00\xff\x00'
    assert JpegIndex.of(bytes(data)) is None


def test_an_index_of_another_file_is_not_used():
    other = JpegIndex.of(jpeg(photograph()[:40, :60]))
    assert other.cut(SMALL, (0, 0, 50, 40), 1) is None
    longer = JpegIndex(JpegIndex.of(SMALL).data + bytes(12))
    assert longer.cut(SMALL, (0, 0, 50, 40), 1) is None


def test_its_size_is_some_per_cent_of_the_file():
    encoded = jpeg(photograph(), quality=95, subsampling='4:2:0')
    size = len(JpegIndex.of(encoded).data)
    assert size == 12 * (20 * 27 + 2) < 0.06 * len(encoded)


def outcome(act):
    """The pixels, or the reason why there are none."""
    try:
        return act()
    except ImageError as error:
        return error.reason


@needs_turbo
@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_gives_what_it_gives_without_an_index(data):
    subsampling = data.draw(st.sampled_from(['4:2:0', '4:4:4', 'grey']))
    encoded = bytearray(turbo_jpeg(photograph()[100:148, 100:180],
                                   subsampling, 50))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(2, len(encoded) - 1))
                ] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([None, -2, -30]))
    encoded = bytes(encoded[:end])
    decoder = create_decoder('turbojpeg', max_pixels=10 ** 5)
    index = decoder.index(encoded)
    if index is None:
        return
    plan = Crop(data.draw(boxes(*index.size)), (7, 9))
    expected = outcome(lambda: decoder.decode(encoded, plan))
    found = outcome(lambda: decoder.decode_indexed(encoded, index, plan))
    numpy.testing.assert_array_equal(found, expected)


@needs_turbo
@settings(max_examples=150)
@given(st.data())
def test_a_damaged_index_gives_pixels_or_nothing(data):
    encoded = turbo_jpeg(photograph()[100:148, 100:280],
                         data.draw(st.sampled_from(['4:2:0', 'grey'])))
    decoder = create_decoder('turbojpeg')
    whole = decoder.index(encoded)
    changed = bytearray(whole.data)
    for _ in range(data.draw(st.integers(1, 20))):
        changed[data.draw(st.integers(12, len(changed) - 1))
                ] = data.draw(st.integers(0, 255))
    index = JpegIndex(bytes(changed))
    box = data.draw(boxes(180, 48))
    part = index.cut(encoded, box, 1)
    if part is not None:
        found = decoded(*part, 1)
        assert found is None or found.shape == (box[3], box[2], 3)
    plan = Crop(box, (5, 5))
    assert decoder.decode_indexed(encoded, index, plan).shape == (5, 5, 3)
