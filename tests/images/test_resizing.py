from chainer_fp8pipe.images import resizing
from chainer_fp8pipe.images.resizing import (
    crop_and_resize,
    resize,
    resize_part,
    shrink_for,
)
from chainer_fp8pipe.images.transforms import Crop

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.images.pictures import difference, photograph


@pytest.fixture(params=[True, False], ids=['cykooz', 'pillow'])
def fast(request, monkeypatch):
    if request.param and not resizing.FAST:
        pytest.skip('cykooz-resizer is not installed')
    monkeypatch.setattr(resizing, 'FAST', request.param)


@pytest.mark.usefixtures('fast')
@pytest.mark.parametrize('size', [(224, 224), (31, 57), (640, 700), (1, 1)])
def test_resizing_equals_pillows_bilinear_to_one_level(size):
    expected = numpy.asarray(Image.fromarray(photograph()).resize(
        size[::-1], Image.Resampling.BILINEAR))
    assert difference(resize(photograph(), size), expected).max() <= 1


@pytest.mark.usefixtures('fast')
def test_edges_of_a_box_may_lie_within_pixels():
    box = (10.25, 20.5, 300.75, 250.125)
    expected = numpy.asarray(Image.fromarray(photograph()).resize(
        (64, 48), Image.Resampling.BILINEAR, box))
    assert difference(resize(photograph(), (48, 64), box),
                      expected).max() <= 1


@pytest.mark.usefixtures('fast')
def test_a_part_is_taken_before_it_is_resized():
    plan = Crop((101, 53, 200, 150), (75, 100), flip=True)
    alone = photograph()[53:203, 101:301].copy()
    numpy.testing.assert_array_equal(
        crop_and_resize(photograph(), plan),
        resize(alone, (75, 100))[:, ::-1])


def test_the_result_shares_no_memory_with_what_is_resized():
    pixels = photograph().copy()
    result = crop_and_resize(pixels, Crop((0, 0, 640, 427), (427, 640)))
    numpy.testing.assert_array_equal(result, pixels)
    assert not numpy.shares_memory(result, pixels)


@pytest.mark.parametrize('box', [
    (-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 641, 5), (0, 0, 5, 428),
    (636, 0, 5, 5), (0, 0, 0, 5), (0, 0, 5, 0)])
def test_a_part_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match='not inside an image of 640 x 427'):
        crop_and_resize(photograph(), Crop(box, (8, 8)))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400),
       st.integers(1, 400))
def test_shrinking_never_goes_below_the_result_and_nearly_reaches_it(
        width, height, h, w):
    shrink = shrink_for(Crop((0, 0, width, height), (h, w)))
    assert shrink in (1, 2, 4, 8)
    assert shrink == 1 or (width / shrink >= w and height / shrink >= h)
    assert shrink == 8 or width / shrink < 2 * w or height / shrink < 2 * h


def test_the_box_in_a_shrunk_part_counts_what_was_left_out():
    plan = Crop((101, 50, 400, 300), (75, 100))
    numpy.testing.assert_array_equal(
        resize_part(photograph(), plan, 4, 25, 12),
        resize(photograph(), (75, 100), (.25, .5, 100.25, 75.5)))
