import math
import pickle

from chainer_fp8pipe.images.transforms import (
    CenterCrop,
    Crop,
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


def _distance(values, cumulative):
    """Kolmogorov's distance of a sample to a distribution on [0, 1]."""
    values = numpy.sort(values)
    steps = numpy.arange(len(values) + 1) / len(values)
    there = cumulative(values)
    return max(numpy.max(steps[1:] - there), numpy.max(there - steps[:-1]))


def _likely(samples):
    """A distance that one sample in a thousand exceeds."""
    return 1.95 / math.sqrt(samples)


def _uniform(values):
    return numpy.clip(values, 0, 1)


@settings(max_examples=200)
@given(st.data())
def test_every_part_is_inside_the_image_and_has_the_asked_size(data):
    width, height = data.draw(st.tuples(*[st.integers(1, 3000)] * 2))
    scale = sorted(data.draw(st.tuples(*[st.floats(0.01, 1)] * 2)))
    ratio = sorted(data.draw(st.tuples(*[st.floats(0.1, 10)] * 2)))
    transform = RandomResizedCrop((30, 40), tuple(scale), tuple(ratio))
    plan = transform.plan(width, height, numpy.random.default_rng(
        data.draw(st.integers(0, 1000))))
    left, top, w, h = plan.box
    assert left >= 0
    assert top >= 0
    assert 1 <= w <= width - left
    assert 1 <= h <= height - top
    assert plan.size == (30, 40)
    assert all(type(number) is int for number in plan.box)
    assert type(plan.flip) is bool


def test_area_shape_and_place_are_distributed_as_defined():
    # Every part of at most half a square fits, so none is drawn again.
    side, scale = 4000, (0.08, 0.5)
    plans = _plans(RandomResizedCrop(224, scale), side, side)
    left, top, w, h = numpy.array([plan.box for plan in plans]).T
    limit = _likely(len(plans))
    area = (w * h / side ** 2 - scale[0]) / (scale[1] - scale[0])
    assert _distance(area, _uniform) < limit
    shape = numpy.log(w / h) / math.log(16 / 9) + 0.5
    assert _distance(shape, _uniform) < limit
    assert _distance(left / (side - w), _uniform) < limit
    assert _distance(top / (side - h), _uniform) < limit
    assert abs(numpy.mean([plan.flip for plan in plans]) - 0.5) < 0.03


def test_parts_that_do_not_fit_are_drawn_again():
    width, height, count = 500, 333, 4000
    plans = _plans(RandomResizedCrop(224), width, height, count)
    rng = numpy.random.default_rng(99)
    area = rng.uniform(0.08, 1, 20 * count) * width * height
    shape = numpy.exp(rng.uniform(math.log(.75), math.log(4 / 3), 20 * count))
    w = numpy.round(numpy.sqrt(area * shape))
    h = numpy.round(numpy.sqrt(area / shape))
    fits = (w <= width) & (h <= height)
    reference = numpy.sort((w * h)[fits])
    ours = numpy.array([plan.box[2] * plan.box[3] for plan in plans])
    assert _distance(ours, lambda values: numpy.searchsorted(
        reference, values, 'right') / len(reference)) < 1.2 * _likely(count)
    # Not so if none had been drawn again.
    assert fits.mean() < 0.9


@pytest.mark.parametrize(('size', 'box'), [
    ((1000, 10), (493, 0, 13, 10)),     # as wide as 4 : 3 allows
    ((10, 1000), (0, 493, 10, 13)),
    ((1, 1), (0, 0, 1, 1)),
])
def test_a_crop_that_never_fits_is_the_centre(size, box):
    assert {plan.box for plan in _plans(
        RandomResizedCrop(224), *size, count=20)} == {box}


@pytest.mark.parametrize('flip', [0, 1])
def test_the_whole_image_and_mirroring_can_be_asked_for(flip):
    transform = RandomResizedCrop(8, (1, 1), (1, 1), flip=flip)
    assert set(_plans(transform, 50, 50, 50)) == {
        Crop((0, 0, 50, 50), (8, 8), bool(flip))}


def test_the_same_random_numbers_give_the_same_plans():
    transform = RandomResizedCrop(8)
    assert (_plans(transform, 50, 40, 20, seed=1)
            == _plans(pickle.loads(pickle.dumps(transform)), 50, 40, 20,
                      seed=1))
    assert (_plans(transform, 50, 40, 20, seed=1)
            != _plans(transform, 50, 40, 20, seed=2))


@pytest.mark.parametrize(('size', 'box'), [
    ((256, 256), (16, 16, 224, 224)),   # resized to itself
    ((512, 512), (32, 32, 448, 448)),   # to half
    ((500, 375), (86, 23, 328, 328)),   # 375 / 256 * 224 = 328.1
    ((375, 500), (23, 86, 328, 328)),
    ((100, 100), (6, 6, 88, 88)),       # 87.5
])
def test_the_central_part_is_that_of_the_resized_image(size, box):
    assert CenterCrop(224, 256).plan(*size) == Crop(box, (224, 224))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_central_part_is_inside_any_image(width, height):
    left, top, w, h = CenterCrop((64, 32), 64).plan(width, height).box
    assert 1 <= w <= width
    assert 1 <= h <= height
    assert abs(2 * left + w - width) <= 1
    assert abs(2 * top + h - height) <= 1


@pytest.mark.parametrize('normalise', [Normalise(), None])
def test_pixels_become_channels_first_and_normalised(normalise):
    pixels = numpy.random.default_rng(0).integers(
        0, 256, (4, 5, 3)).astype(numpy.uint8)[:, ::-1]
    transform = CenterCrop((4, 5), normalise=normalise)
    out = numpy.zeros(transform.shape, transform.dtype)
    assert transform.finish(pixels, out) is out
    expected = pixels.transpose(2, 0, 1)
    numpy.testing.assert_allclose(
        out, normalise(expected) if normalise else expected, rtol=1e-6)
    numpy.testing.assert_array_equal(transform.finish(pixels), out)


@pytest.mark.parametrize(('make', 'message'), [
    (lambda: RandomResizedCrop(0), 'size'),
    (lambda: RandomResizedCrop((8, 8, 8)), 'size'),
    (lambda: RandomResizedCrop(8, scale=(0, 1)), 'scale'),
    (lambda: RandomResizedCrop(8, scale=(.5, .2)), 'scale'),
    (lambda: RandomResizedCrop(8, scale=(.5, 2)), 'scale'),
    (lambda: RandomResizedCrop(8, ratio=(2, 1)), 'ratio'),
    (lambda: RandomResizedCrop(8, ratio=(0, 1)), 'ratio'),
    (lambda: RandomResizedCrop(8, flip=1.5), 'probability'),
    (lambda: CenterCrop(224, 200), 'resize=224 or more'),
])
def test_settings_that_cannot_be_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize('kind', [RandomResizedCrop, CenterCrop])
def test_normalising_must_fit_three_channels(kind):
    with pytest.raises(ValueError, match='of 4 channels, but images have 3'):
        kind(8, normalise=Normalise((0,) * 4, (1,) * 4))
    one, three = (kind(8, normalise=Normalise((.5,) * count, (.2,) * count))
                  for count in (1, 3))
    pixels = numpy.arange(192, dtype=numpy.uint8).reshape(8, 8, 3)
    assert (one.finish(pixels) == three.finish(pixels)).all()


@pytest.mark.parametrize('size', [
    numpy.int64(7), (numpy.int32(7), 7), numpy.array([7, 7])])
def test_sizes_may_be_of_numpy(size):
    assert RandomResizedCrop(size).size == (7, 7)
    assert all(type(side) is int for side in CenterCrop(size).size)


def test_transforms_write_all_that_makes_a_difference():
    made = [RandomResizedCrop(8), RandomResizedCrop(9),
            RandomResizedCrop(8, scale=(0.1, 1)),
            RandomResizedCrop(8, ratio=(1, 1)), RandomResizedCrop(8, flip=0),
            RandomResizedCrop(8, normalise=None),
            RandomResizedCrop(8, normalise=Normalise(dtype='f2')),
            CenterCrop(8), CenterCrop(8, 10)]
    assert len(set(map(repr, made))) == len(made)
    assert repr(made[0]) == repr(RandomResizedCrop((8, 8)))
