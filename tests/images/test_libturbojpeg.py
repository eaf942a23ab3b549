import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize('data', [b'', b'no image', jpeg(
    photograph()[:16, :16], mode='CMYK')], ids=['empty', 'text', 'CMYK'])
def test_a_file_that_the_library_cannot_decode_gives_none(data):
    assert decoded(data, 16, 16, (0, 0, 16, 16), 1) is None
