import itertools

from chainer_fp8pipe.pipeline.backprop import ENOUGH, GradientSums

import chainer
import chainer.links as L
import numpy as np
import pytest


def parameter(dtype='f'):
    made = chainer.Parameter(np.zeros(3, dtype))
    made.cleargrad()
    return made


def test_the_sum_has_the_bits_of_adding_one_after_the_other():
    """In each step anew; what is added is only read, the rest left alone."""
    random = np.random.RandomState(0)
    weight, unused, sums = parameter(), parameter(), GradientSums()
    for scale in (None, 8.0):
        parts = [random.randn(3).astype('f') for _ in range(5)]
        copies = [part.copy() for part in parts]
        for part in parts:
            sums.add(weight, part)
        sums.finish(scale)
        expected = copies[0]
        for part in copies[1:]:
            expected = expected + part
        assert weight.grad.tobytes() == expected.tobytes()
        assert np.array_equal(parts, copies)
        assert unused.grad is None
    chainer.optimizers.SGD(1.0).create_update_rule().update(weight)
    np.testing.assert_allclose(weight.array, -expected / 8)


def test_half_precision_is_summed_in_float32():
    weight, sums = parameter(np.float16), GradientSums()
    sums.add(weight, np.full(3, 2048, np.float16))
    for _ in range(4):      # each alone is lost beside 2048 in float16
        sums.add(weight, np.full(3, 0.5, np.float16))
    sums.finish(None)
    assert weight.grad.dtype == np.float16
    assert weight.grad.tolist() == [2050, 2050, 2050]


def test_what_chainer_left_in_a_parameter_is_taken_over():
    weight, sums = parameter(), GradientSums()
    for _ in range(2):
        weight.grad = np.ones(3, 'f')
        sums.collect([weight, chainer.Parameter()])
        assert weight.grad is None
    sums.finish(None)
    assert weight.grad.tolist() == [2, 2, 2]


def parts_of(*sizes):
    """Gradients of outputs and inputs, for layers of 3 by 2."""
    random = np.random.RandomState(0)
    return [(random.randn(size, 3).astype('f'),
             random.randn(size, 2).astype('f')) for size in sizes]


def joined(parts):
    """The gradient of W as one product."""
    gradient, inputs = map(np.concatenate, zip(*parts, strict=True))
    return gradient.T.dot(inputs)


def given(sums, layer, part):
    sums.take_product(layer.W, layer.b, *part)


def settled(parts, *settle_after):
    layer, sums = L.Linear(2, 3), GradientSums()
    for number, part in enumerate(parts):
        given(sums, layer, part)
        if number in settle_after:
            sums.settle([layer.W])
    sums.finish(None)
    return layer


@pytest.mark.parametrize(('sizes', 'settle_after', 'groups'), [
    ((100, 100, 100, 256, 10, 20), (), (3, 4, 6)),  # as soon as it is ENOUGH
    ((10, 20, 30, 40), (1, 2), (2, 3, 4)),
    ((10,), (), (1,))])
def test_small_products_are_made_together(sizes, settle_after, groups):
    assert ENOUGH == 256
    parts = parts_of(*sizes)
    layer = settled(parts, *settle_after)
    ends = (0, *groups)
    first, *others = [joined(parts[start:end])
                      for start, end in itertools.pairwise(ends)]
    for other in others:
        first += other
    assert layer.W.grad.tobytes() == first.tobytes()
    np.testing.assert_allclose(
        layer.b.grad, sum(gradient.sum(axis=0) for gradient, _ in parts),
        rtol=1e-4, atol=1e-4)


def test_a_bias_is_summed_in_each_micro_batch_first():
    """Its samples' gradients cancel below a batch normalisation."""
    half = np.random.RandomState(0).randn(4, 1, 3).astype('f')
    parts = [(np.concatenate([one, 1e-6 - one]), np.ones((2, 2), 'f'))
             for one in half]
    expected = sum(gradient.astype('d').sum(axis=0) for gradient, _ in parts)
    np.testing.assert_allclose(settled(parts).b.grad, expected, 1e-6)


def test_layers_that_share_a_weight_share_its_sum():
    one, other, sums = L.Linear(2, 3), L.Linear(2, 3), GradientSums()
    parts = parts_of(10, 20)
    sums.take_product(one.W, one.b, *parts[0])
    sums.take_product(one.W, other.b, *parts[1])
    sums.finish(None)
    np.testing.assert_allclose(
        one.W.grad, joined(parts[:1]) + joined(parts[1:]), rtol=1e-5)
    for layer, (gradient, _) in zip((one, other), parts, strict=True):
        np.testing.assert_allclose(layer.b.grad, gradient.sum(axis=0),
                                   rtol=1e-5)
