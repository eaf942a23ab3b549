import contextlib
import logging
import struct
from unittest import mock

from chainer_fp8pipe.images import decoding
from chainer_fp8pipe.images.decoding import decode_part, resize
from chainer_fp8pipe.images.transforms import Crop, RandomResizedCrop

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from .pictures import difference, jpeg, photograph, png, reference

needs_turbo = pytest.mark.skipif(
    decoding.library() is None,
    reason='there is no libturbojpeg 3: pip install turbojpeg')
every_decoder = pytest.mark.parametrize('name', [
    pytest.param('turbo', marks=needs_turbo), 'pillow'])
WHOLE = Crop((0, 0, 50, 40), (40, 50))
SMALL = photograph()[:40, :50]


def decode(name, data, plan):
    with contextlib.ExitStack() as stack:
        if name == 'pillow':
            stack.enter_context(mock.patch.object(
                decoding, 'library', return_value=None))
        return decoding.decode(data, plan if callable(plan) else (
            lambda width, height: plan))


# --- what is no image

def _claiming(height, width):
    data = bytearray(jpeg(SMALL))
    frame = data.index(b'\xff\xc0')
    data[frame + 5:frame + 9] = struct.pack('>HH', height, width)
    return bytes(data)


@every_decoder
@pytest.mark.parametrize(('data', 'reason'), [
    (b'', 'neither JPEG nor PNG'),
    (bytes(1000), 'neither JPEG nor PNG'),
    (b'GIF89a' + bytes(100), 'neither JPEG nor PNG.*GIF89a'),
    (b'\xff\xd8', 'cannot identify'),
    (b'\xff\xd8\xff\xd9', 'cannot identify'),
    (b'\x89PNG\r\n\x1a\n', 'cannot identify'),
    (png(SMALL)[:-100], 'truncated|broken'),
    (jpeg(SMALL)[:-100], 'truncated'),
    (jpeg(SMALL, progressive=True)[:-100], 'truncated'),
    (_claiming(0, 50), 'cannot identify|broken'),
    (_claiming(65000, 64000), '89,478,485 are allowed|4160000000 pixels'),
])
def test_a_file_that_is_no_image_is_an_error_with_its_fault(
        name, data, reason):
    with pytest.raises(Exception, match=reason):    # Pillow's are many
        decode(name, data, WHOLE)


# --- decoders

@every_decoder
@settings(max_examples=20)
@given(st.data())
def test_a_part_is_what_cropping_and_resizing_the_whole_gives(name, data):
    width, height = data.draw(st.tuples(*[st.integers(1, 120)] * 2))
    plan = RandomResizedCrop((60, 61)).plan(
        width, height, numpy.random.default_rng(data.draw(
            st.integers(0, 2 ** 32 - 1))))
    encoded = jpeg(photograph()[100:100 + height, 200:200 + width],
                   subsampling=data.draw(
                       st.sampled_from(['4:4:4', '4:2:2', '4:2:0'])),
                   progressive=data.draw(st.booleans()))
    # Less than twice as large as needed: decoding does not shrink.
    found = difference(decode(name, encoded, plan),
                       reference(encoded, plan))
    assert found.max() <= 2
    assert (found > 1).mean() < 0.001


@every_decoder
def test_shrinking_while_decoding_changes_little(name):
    for side in 213, 106, 50, 25:
        plan = Crop((7, 1, 426, 425), (side, side), True)
        encoded = jpeg(photograph())
        assert difference(decode(name, encoded, plan),
                          reference(encoded, plan)).mean() < 3


@needs_turbo
@pytest.mark.parametrize('kind', [
    {'subsampling': '4:4:4'}, {'subsampling': '4:2:2'},
    {'subsampling': '4:2:0'}, {'mode': 'L'}], ids=str)
@settings(max_examples=20)
@given(st.data())
def test_the_fast_library_gives_a_part_the_very_pixels_of_the_whole(
        kind, data):
    width, height = data.draw(st.tuples(*[st.integers(1, 90)] * 2))
    left, top = (data.draw(st.integers(0, side - 1))
                 for side in (width, height))
    w, h = (data.draw(st.integers(1, side))
            for side in (width - left, height - top))
    shrink = data.draw(st.sampled_from([1, 2, 4, 8]))
    encoded = jpeg(photograph()[100:100 + height, 200:200 + width],
                   progressive=data.draw(st.booleans()), **kind)

    def decoded(*box):
        return decode_part(
            encoded, lambda *size: (Crop(box, (1, 1)), shrink))[0]
    whole = decoded(0, 0, width, height)
    assert whole.shape == (-(-height // shrink), -(-width // shrink), 3)
    numpy.testing.assert_array_equal(decoded(left, top, w, h), whole[
        top // shrink:-(-(top + h) // shrink),
        left // shrink:-(-(left + w) // shrink)])


def _kinds():
    """Encoded images of 40 rows of 50, the pixels they mean, mean error."""
    ink = numpy.broadcast_to(numpy.uint8([200, 100, 50]), (40, 50, 3))
    red = numpy.zeros((40, 50, 3), numpy.uint8)
    red[:4] = 255, 0, 0
    deep = numpy.arange(2000, dtype=numpy.uint16).reshape(40, 50) * 32
    grey = numpy.repeat((SMALL @ numpy.array([.299, .587, .114])).astype(
        numpy.uint8)[..., None], 3, 2)
    clear = numpy.dstack([SMALL, numpy.zeros((40, 50), numpy.uint8)])
    turned = Image.Exif()
    turned[0x0112] = 6      # by 90 degrees: this is left to the user
    return {
        'grey JPEG': (jpeg(SMALL, mode='L'), grey, 3),
        'grey PNG': (png(SMALL, mode='L'), grey, 1),
        'ink': (jpeg(ink, mode='CMYK'), ink, 1),
        'transparent': (png(clear), SMALL, 0),
        'sixteen bits': (png(deep), numpy.repeat(
            (deep >> 8).astype(numpy.uint8)[..., None], 3, 2), 0),
        'palette': (png(red, mode='P'), red, 0),
        'turned': (jpeg(SMALL, exif=turned, quality=100,
                        subsampling='4:4:4'), SMALL, 1),
    }


@every_decoder
@pytest.mark.parametrize('kind', list(_kinds()))
def test_every_kind_of_image_becomes_eight_bits_of_three_colours(name, kind):
    encoded, pixels, limit = _kinds()[kind]
    assert difference(decode(name, encoded, WHOLE), pixels).mean() <= limit
    if kind == 'ink':
        shrunk = decode(name, encoded, Crop((0, 0, 50, 40), (10, 12)))
        assert difference(shrunk, pixels[:10, :12]).max() < 5


@every_decoder
@settings(max_examples=40)
@given(st.data())
def test_a_damaged_file_gives_an_image_or_an_image_error(name, data):
    encoded = bytearray(jpeg(
        photograph()[100:148, 100:164],
        progressive=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(2, len(encoded) - 1))
        encoded[place] = data.draw(st.integers(0, 255))
    def corner(width, height):
        return Crop((width // 2, height // 2, width - width // 2,
                     height - height // 2), (20, 20))
    with mock.patch.object(decoding, 'MAX_PIXELS', 10 ** 5):
        try:
            found = decode(name, bytes(encoded), corner)
            assert found.shape == (20, 20, 3)
        except (OSError, SyntaxError, ValueError):
            pass


@needs_turbo
def test_the_fast_library_is_used_and_decodes_the_part_alone(monkeypatch):
    given = []
    monkeypatch.setattr(decoding, 'resize', lambda pixels, *plan: (
        given.append((pixels.shape, *plan[1:]))))
    decode('turbo', jpeg(photograph()), Crop((200, 100, 120, 130), (60, 60)))
    assert given == [((65, 60, 3), 2)]


def test_a_missing_library_is_replaced_by_pillow_and_logged_once(
        monkeypatch, caplog):
    monkeypatch.setattr(decoding.ctypes, 'CDLL', mock.Mock(
        side_effect=OSError))
    decoding.library.cache_clear()
    try:
        for _ in range(3):
            decoding.decode(jpeg(SMALL), lambda width, height: WHOLE)
    finally:
        decoding.library.cache_clear()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert 'libturbojpeg 3' in caplog.text
    assert 'chainer_fp8pipe[images]' in caplog.text


# --- resizing

@pytest.fixture(params=[True, False], ids=['cykooz', 'pillow'])
def resizer(request, monkeypatch):
    if request.param and not decoding.cykooz_resizer:
        pytest.skip('cykooz-resizer is not installed')
    if not request.param:
        monkeypatch.setattr(decoding, 'cykooz_resizer', None)


def bilinear(pixels, size, box=None):
    return numpy.asarray(Image.fromarray(pixels).resize(
        size[::-1], Image.Resampling.BILINEAR, box))


@pytest.mark.usefixtures('resizer')
@pytest.mark.parametrize(('plan', 'shrink', 'box'), [
    *((Crop((0, 0, 640, 427), size), 1, None)
      for size in ((224, 224), (31, 57), (640, 700), (1, 1))),
    # Its edges lie within pixels, and what was left out counts.
    (Crop((101, 50, 400, 300), (75, 100)), 4, (.25, .5, 100.25, 75.5)),
])
def test_resizing_equals_pillows_bilinear_to_one_level(plan, shrink, box):
    found = resize(photograph(), plan, shrink)
    expected = bilinear(photograph(), plan.size, box)
    assert difference(found, expected).max() <= 1


@pytest.mark.parametrize('box', [
    (-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 51, 5), (0, 0, 5, 41),
    (46, 0, 5, 5), (0, 0, 0, 5), (0, 0, 5, 0)])
def test_a_part_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match='inside an image of 50 x 40'):
        decode('pillow', jpeg(SMALL), Crop(box, (8, 8)))
