from chainer_fp8pipe.pipeline.backprop import GradientSums

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
        first, *others = copies = [part.copy() for part in parts]
        for part in parts:
            sums.take(weight, part)
        sums.finish(scale)
        for part in others:
            first = first + part
        assert weight.grad.tobytes() == first.tobytes()
        assert np.array_equal(parts, copies)
        assert unused.grad is None
    chainer.optimizers.SGD(1.0).create_update_rule().update(weight)
    np.testing.assert_allclose(weight.array, -first / 8)


def test_half_precision_is_summed_in_float32():
    weight, sums = parameter(np.float16), GradientSums()
    sums.take(weight, np.full(3, 2048, np.float16))
    for _ in range(4):      # each alone is lost beside 2048 in float16
        sums.take(weight, np.full(3, 0.5, np.float16))
    sums.finish(None)
    assert weight.grad.dtype == np.float16
    assert weight.grad.tolist() == [2050, 2050, 2050]


def parts_of(*sizes):
    """Gradients of outputs and inputs, for layers of 3 by 2."""
    random = np.random.RandomState(0)
    return [(random.randn(size, 3).astype('f'),
             random.randn(size, 2).astype('f')) for size in sizes]


@pytest.mark.parametrize('settle_after', [(), (1, 2)])
def test_products_that_are_put_off_add_up(settle_after):
    parts, layer, sums = parts_of(100, 156, 10, 20), L.Linear(2, 3), (
        GradientSums())
    for number, part in enumerate(parts):
        sums.take_product(layer.W, layer.b, *part)
        if number in settle_after:
            sums.settle([layer.W])
    sums.finish(None)
    np.testing.assert_allclose(layer.W.grad, sum(
        gradient.T.dot(inputs) for gradient, inputs in parts), 1e-4, 1e-4)
    np.testing.assert_allclose(layer.b.grad, sum(
        gradient.sum(axis=0) for gradient, _ in parts), 1e-4, 1e-4)


def test_a_bias_is_summed_in_each_micro_batch_first():
    """Its samples' gradients cancel below a batch normalisation."""
    half = np.random.RandomState(0).randn(4, 1, 3).astype('f')
    parts = [np.concatenate([one, 1e-6 - one]) for one in half]
    layer, sums = L.Linear(2, 3), GradientSums()
    for part in parts:
        sums.take_product(layer.W, layer.b, part, np.ones((2, 2), 'f'))
    sums.finish(None)
    np.testing.assert_allclose(layer.b.grad, sum(
        part.astype('d').sum(axis=0) for part in parts), 1e-6)


def test_layers_that_share_a_weight_share_its_sum():
    one, other, sums = L.Linear(2, 3), L.Linear(2, 3), GradientSums()
    parts = parts_of(10, 20)
    sums.take_product(one.W, one.b, *parts[0])
    sums.take_product(one.W, other.b, *parts[1])
    sums.finish(None)
    np.testing.assert_allclose(one.W.grad, sum(
        gradient.T.dot(inputs) for gradient, inputs in parts), 1e-5)
    for layer, (gradient, _) in zip((one, other), parts, strict=True):
        np.testing.assert_allclose(layer.b.grad, gradient.sum(axis=0),
                                   rtol=1e-5)


def test_a_gradient_that_is_kept_stays_and_another_is_reused():
    kept, dropped, sums = parameter(), parameter(), GradientSums()
    memory = []
    for step in range(3):
        for weight in (kept, dropped):
            weight.cleargrad()
            sums.take(weight, np.full(3, step, 'f'))
        sums.finish(None)
        memory.append((kept.grad[1:], dropped.grad.ctypes.data))
    views, places = zip(*memory, strict=True)
    assert [view.tolist() for view in views] == [[0, 0], [1, 1], [2, 2]]
    assert len(set(places)) == 1
