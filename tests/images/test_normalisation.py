from chainer_fp8pipe.images.transforms import Normalise

import numpy
import pytest


def _reference(batch, mean, std):
    shape = (3, 1, 1)
    return ((batch.astype('f8') / 255 - numpy.reshape(mean, shape))
            / numpy.reshape(std, shape))


@pytest.mark.parametrize(('shape', 'dtype', 'atol'), [
    ((3, 4, 5), 'f4', 2e-6), ((2, 3, 4, 5), 'f4', 2e-6),
    ((0, 3, 4, 5), 'f4', 0), ((2, 3, 4, 5), 'f2', 1e-2)])
def test_normalising_equals_the_definition_in_float64(shape, dtype, atol):
    batch = numpy.random.default_rng(0).integers(
        0, 256, shape).astype(numpy.uint8)
    before = batch.copy()
    mean, std = (.5, .4, .3), (.2, .3, .1)
    result = Normalise(mean, std, dtype=dtype)(batch)
    assert result.dtype == dtype
    numpy.testing.assert_allclose(result, _reference(batch, mean, std),
                                  rtol=0, atol=atol)
    assert (batch == before).all()


def test_one_number_is_for_all_channels():
    batch = numpy.random.default_rng(0).integers(
        0, 256, (2, 3, 4, 5)).astype(numpy.uint8)
    one, three = Normalise((.5,), (.2,)), Normalise((.5,) * 3, (.2,) * 3)
    assert (one(batch) == three(batch)).all()
    out = numpy.full((3, 4, 5), numpy.nan, 'f4')
    one.of_pixels(batch[0].transpose(1, 2, 0), out)
    numpy.testing.assert_allclose(out, three(batch[0]), rtol=1e-6)


@pytest.mark.parametrize('count', [2, 4])
def test_other_numbers_of_channels_are_an_error(count):
    normalise = Normalise((.5,) * count, (.2,) * count)
    message = f'of {count} channels, but images have 3: give 3 numbers'
    with pytest.raises(ValueError, match=message):
        normalise(numpy.zeros((1, 3, 2, 2), numpy.uint8))
    with pytest.raises(ValueError, match=message):
        normalise.of_pixels(numpy.zeros((2, 2, 3), numpy.uint8),
                            numpy.empty((3, 2, 2), 'f4'))


@pytest.mark.parametrize(('mean', 'std', 'message'), [
    ((0, 0), (1, 1, 1), 'mean has 2 channels but std 3'),
    ((0, 0, 0), (1, 0, 1), 'above zero'),
    ((0, 0, 0), (1, float('nan'), 1), 'above zero'),
    ((), (), 'one number'),
])
def test_numbers_that_cannot_be_are_errors(mean, std, message):
    with pytest.raises(ValueError, match=message):
        Normalise(mean, std)
