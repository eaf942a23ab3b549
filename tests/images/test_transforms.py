import math

from chainer_fp8pipe.images.transforms import (
    CenterCrop,
    Normalise,
    RandomResizedCrop,
)

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def _plans(transform, width, height, count=4000, seed=0):
    rng = numpy.random.default_rng(seed)
    return [transform.plan(width, height, rng) for _ in range(count)]


@settings(max_examples=200)
@given(st.data())
def test_every_part_is_inside_the_image_and_has_the_asked_size(data):
    width, height = data.draw(st.tuples(*[st.integers(1, 3000)] * 2))
    scale = sorted(data.draw(st.tuples(*[st.floats(0.01, 1)] * 2)))
    ratio = sorted(data.draw(st.tuples(*[st.floats(0.1, 10)] * 2)))
    random = RandomResizedCrop((30, 40), tuple(scale), tuple(ratio))
    for transform in random, CenterCrop((30, 40)):
        plan = transform.plan(width, height, numpy.random.default_rng(
            data.draw(st.integers(0, 1000))))
        left, top, w, h = plan.box
        assert 0 <= left <= width - w < width
        assert 0 <= top <= height - h < height
        assert plan.size == (30, 40)
        assert {*map(type, plan.box)} == {int}
        assert type(plan.flip) is bool
    assert abs(2 * left + w - width) <= 1       # the centre
    assert abs(2 * top + h - height) <= 1


def test_area_shape_and_place_are_distributed_as_defined():
    # Every part of at most half a square fits, so none is drawn again.
    side, scale = 4000, (0.08, 0.5)
    plans = _plans(RandomResizedCrop(224, scale), side, side)
    left, top, w, h = numpy.array([plan.box for plan in plans]).T
    for values in ((w * h / side ** 2 - scale[0]) / (scale[1] - scale[0]),
                   numpy.log(w / h) / math.log(16 / 9) + 0.5,
                   left / (side - w), top / (side - h)):
        # Uniform from 0 to 1, as the quarters say.
        assert values.min() > -0.01
        assert values.max() < 1.01
        assert numpy.allclose(numpy.quantile(values, [.25, .5, .75]),
                              [.25, .5, .75], atol=0.03)
    assert abs(numpy.mean([plan.flip for plan in plans]) - 0.5) < 0.03


@pytest.mark.parametrize(('transform', 'size', 'box'), [
    # A part that never fits is the centre, as wide as 4 : 3 allows.
    (RandomResizedCrop(224), (1000, 10), (493, 0, 13, 10)),
    (RandomResizedCrop(224), (10, 1000), (0, 493, 10, 13)),
    (RandomResizedCrop(224), (1, 1), (0, 0, 1, 1)),
    (RandomResizedCrop(224, (1, 1), (1, 1)), (50, 50), (0, 0, 50, 50)),
    (CenterCrop(224), (256, 256), (16, 16, 224, 224)),
    (CenterCrop(224), (512, 512), (32, 32, 448, 448)),
    (CenterCrop(224), (500, 375), (86, 23, 328, 328)),  # 375 / 256 * 224
    (CenterCrop(224), (375, 500), (23, 86, 328, 328)),
    (CenterCrop(224), (100, 100), (6, 6, 88, 88)),      # 87.5
])
def test_parts_derived_by_hand(transform, size, box):
    assert {plan.box for plan in _plans(transform, *size, 20)} == {box}


@pytest.mark.parametrize(('make', 'message'), [
    (lambda: RandomResizedCrop(0), 'size must be above zero'),
    (lambda: RandomResizedCrop((8, 8, 8)), 'shape'),
    (lambda: CenterCrop(8.5), 'integer'),
    (lambda: RandomResizedCrop(8, scale=(0, 1)), 'scale must be'),
    (lambda: RandomResizedCrop(8, scale=(.5, .2)), 'scale must be'),
    (lambda: RandomResizedCrop(8, scale=(.5, 2)), 'scale must be'),
    (lambda: RandomResizedCrop(8, ratio=(2, 1)), 'ratio must be'),
    (lambda: RandomResizedCrop(8, ratio=(1, math.inf)), 'ratio must be'),
    (lambda: RandomResizedCrop(8, flip=1.5), 'probability'),
    (lambda: Normalise((0, 0), (1, 1, 1)), 'shape'),
    (lambda: Normalise((0, 0, 0), (1, 0, 1)), 'above zero'),
    (lambda: Normalise((0, 0, 0), (1, float('nan'), 1)), 'above zero'),
    (lambda: Normalise(dtype='i4'), 'of floats, not int32'),
    (lambda: Normalise((0, 0), (1, 1))(numpy.zeros((1, 3, 2, 2), 'u1')),
     'shape'),
    (lambda: Normalise()(numpy.zeros((2, 1, 2, 2), 'u1')), 'shape'),
])
def test_settings_that_cannot_be_are_errors(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# --- pixels

def _pixels(*shape):
    return numpy.random.default_rng(0).integers(
        0, 256, shape).astype(numpy.uint8)


@pytest.mark.parametrize('count', [1, 3])
@pytest.mark.parametrize(('shape', 'dtype', 'atol'), [
    ((3, 4, 5), 'f4', 2e-6), ((2, 3, 4, 5), 'f4', 2e-6),
    ((0, 3, 4, 5), 'f4', 0), ((2, 3, 4, 5), 'f2', 1e-2)])
def test_normalising_equals_the_definition_in_float64(
        shape, dtype, atol, count):
    batch = _pixels(*shape)
    before = batch.copy()
    mean, std = (.5, .4, .3)[:count], (.2, .3, .1)[:count]
    result = Normalise(mean, std, dtype=dtype)(batch)
    assert result.dtype == dtype
    numpy.testing.assert_allclose(
        result, (batch.astype('f8') / 255 - numpy.reshape(mean, (-1, 1, 1)))
        / numpy.reshape(std, (-1, 1, 1)), rtol=0, atol=atol)
    assert (batch == before).all()


@pytest.mark.parametrize('normalise', [
    None, Normalise(), Normalise(.5, .2)])
def test_pixels_become_channels_first_and_normalised(normalise):
    pixels = _pixels(4, 5, 3)[:, ::-1]
    transform = CenterCrop((4, 5), normalise=normalise)
    out = numpy.zeros(transform.shape, transform.dtype)
    found = transform.finish(pixels, out)
    assert (found is out) == (normalise is not None)
    expected = pixels.transpose(2, 0, 1)
    numpy.testing.assert_array_equal(
        found, normalise(expected) if normalise else expected)
    numpy.testing.assert_array_equal(transform.finish(pixels), found)
