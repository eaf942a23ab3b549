"""Batches of an example, whole, in part or repeated."""
from chainer_fp8pipe.planner.example import Example

import numpy
import pytest

from tests.planner.nets import batch


def test_an_example_gives_its_first_samples_or_repeats_them():
    x, t = batch(4)
    few_x, few_t = Example((x, t)).of(3)
    numpy.testing.assert_array_equal(few_x, x[:3])
    numpy.testing.assert_array_equal(few_t, t[:3])
    many = Example({'x': x}).of(9)['x']
    numpy.testing.assert_array_equal(many, numpy.concatenate([x, x, x[:1]]))
    assert Example(x).samples == 4


@pytest.mark.parametrize('example', [
    (numpy.zeros((4, 2)), numpy.zeros(3)), numpy.zeros((0, 2)),
    (numpy.float32(1.0),), ()])
def test_an_example_without_samples_is_refused(example):
    with pytest.raises(ValueError, match='sample'):
        Example(example)


@pytest.mark.parametrize(('samples', 'micro_batch', 'sizes'), [
    (8, 2, (8, 2)), (8, 8, (8, 2)), (8, 9, (8, 2)), (8, 0, (8, 1)),
    (2, 2, (2, 1)), (1, 1, (1, 1))])
def test_a_model_is_measured_with_fewer_samples_as_well(
        samples, micro_batch, sizes):
    assert Example(numpy.zeros((samples, 3))).sizes(micro_batch) == sizes
