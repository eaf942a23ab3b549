import io

from chainer_fp8pipe.images import libturbojpeg

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.images.pictures import jpeg, photograph
from tests.images.turbo import boxes, decoded, needs_turbo

pytestmark = needs_turbo

_KINDS = [{'subsampling': '4:4:4'}, {'subsampling': '4:2:2'},
          {'subsampling': '4:2:0'}, {'mode': 'L'}]


@pytest.mark.parametrize('kind', _KINDS, ids=str)
@settings(max_examples=40)
@given(st.data())
def test_a_part_has_the_very_pixels_of_the_whole(kind, data):
    width, height = data.draw(st.tuples(*[st.integers(1, 90)] * 2))
    left, top, w, h = box = data.draw(boxes(width, height))
    shrink = data.draw(st.sampled_from([1, 2, 4, 8]))
    encoded = jpeg(photograph()[100:100 + height, 200:200 + width],
                   progressive=data.draw(st.booleans()), **kind)
    whole = decoded(encoded, width, height, (0, 0, width, height), shrink)
    part = decoded(encoded, width, height, box, shrink)
    assert whole.shape == (-(-height // shrink), -(-width // shrink), 3)
    numpy.testing.assert_array_equal(part, whole[
        top // shrink:-(-(top + h) // shrink),
        left // shrink:-(-(left + w) // shrink)])


def test_the_whole_is_what_pillow_decodes():
    encoded = jpeg(photograph())
    pixels = decoded(encoded, 640, 427, (0, 0, 640, 427), 1)
    numpy.testing.assert_array_equal(
        pixels, numpy.asarray(Image.open(io.BytesIO(encoded))))


def test_shrinking_averages_pixels():
    encoded = jpeg(photograph()[:400], quality=100, subsampling='4:4:4')
    pixels = decoded(encoded, 640, 400, (0, 0, 640, 400), 8)
    means = photograph()[:400].reshape(50, 8, 80, 8, 3).mean((1, 3))
    assert numpy.abs(pixels - means).mean() < 1


@pytest.mark.parametrize('data', [b'', b'no image', jpeg(
    photograph()[:16, :16], mode='CMYK')], ids=['empty', 'text', 'CMYK'])
def test_a_file_that_the_library_cannot_decode_gives_none(data):
    assert decoded(data, 16, 16, (0, 0, 16, 16), 1) is None


def test_a_large_image_leaves_no_scratch_space_behind():
    decompressor = libturbojpeg.Decompressor()
    large = numpy.zeros((2000, 2000, 3), numpy.uint8)
    pixels = decompressor.decode(jpeg(large), 2000, 2000,
                                 (0, 0, 2000, 2000), 1)
    assert pixels.shape == large.shape
    assert decompressor._scratch.size < large.size
