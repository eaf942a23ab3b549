from chainer_fp8pipe.pipeline.batch_statistics import BatchStatistics
from chainer_fp8pipe.pipeline.gradient_sums import GradientSums
from chainer_fp8pipe.pipeline.linear import LinearTape, forward, is_plain

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.pipeline.blocks import record


def random(*shape, dtype='f'):
    return np.random.RandomState(sum(shape)).randn(*shape).astype(dtype)


def made(inputs, outputs, nobias=False):
    return L.Linear(inputs, outputs, nobias=nobias,
                    initialW=random(outputs, inputs),
                    initial_bias=random(outputs))


def in_float64(layer, x, gradient):
    """Chainer's own: output and gradients of x, W and, if any, b."""
    x, *parameters = (chainer.Variable(array.astype(np.float64)) for array in (
        x, *(parameter.array for parameter in (layer.W, layer.b)
             if parameter is not None)))
    y = F.linear(x, *parameters)
    y.grad = gradient.astype(np.float64)
    y.backward()
    return y.array, x.grad, *(parameter.grad for parameter in parameters)


@pytest.mark.parametrize('order', ['C', 'F'])
@pytest.mark.parametrize('nobias', [False, True])
@pytest.mark.parametrize('sizes', [(4, 5, 3), (1, 1, 1), (60, 300, 17),
                                   (1, 40, 30)])
def test_outputs_and_gradients_are_those_of_chainer(sizes, nobias, order):
    samples, inputs, outputs = sizes
    layer = made(inputs, outputs, nobias)
    x = np.array(random(samples, inputs), order=order)
    gradient = np.array(random(samples, outputs), order=order)
    tape, (y,) = record(layer, (x,), (True,))
    assert isinstance(tape, LinearTape)
    sums = GradientSums()
    found = tape.backward((gradient,), sums)
    sums.finish(None)
    found = y, *found, *(parameter.grad for parameter in (layer.W, layer.b)
                         if parameter is not None)
    for array, expected in zip(found, in_float64(layer, x, gradient),
                               strict=True):
        assert array.dtype == np.float32
        assert array.shape == expected.shape
        assert np.abs(array - expected).max() <= (
            1e-6 * np.abs(expected).max())


def test_arrays_come_in_the_usual_order_and_inputs_are_left_alone():
    layer, x = made(5, 3), np.asfortranarray(random(4, 5))
    before = x.copy()
    tape, (y,) = record(layer, (x,), (True,))
    gradient, = tape.backward((random(4, 3),), GradientSums())
    assert y.flags.c_contiguous
    assert gradient.flags.c_contiguous
    assert np.array_equal(x, before)


def test_no_gradient_gives_none_back():
    layer, sums = made(5, 3), GradientSums()
    layer.cleargrads()
    tape, _ = record(layer, (random(4, 5),), (True,))
    assert tape.backward((None,), sums, defer=True) == (None,)
    tape.backward_weight(sums)
    sums.finish(None)
    assert layer.W.grad is None


def test_a_gradient_of_another_dtype_is_taken():
    layer, sums = made(5, 3), GradientSums()
    tape, _ = record(layer, (random(4, 5),), (True,))
    gradient, = tape.backward((random(4, 3, dtype='d'),), sums)
    sums.finish(None)
    assert gradient.dtype == layer.W.grad.dtype == np.float32


def test_weights_that_wait_for_an_input_get_their_shape():
    layer, x = L.Linear(None, 3), random(4, 5)
    assert is_plain(layer, (x,))
    np.testing.assert_allclose(forward(layer, x), layer(x).array, rtol=1e-5)


class Other(L.Linear):
    pass


class Looking(chainer.LinkHook):
    pass


def hooked():
    layer = made(5, 3)
    layer.add_hook(Looking())
    return layer


def of_float64():
    with chainer.using_config('dtype', np.float64):
        return L.Linear(5, 3)


@pytest.mark.parametrize(('layer', 'x'), [
    (Other(5, 3), random(4, 5)),
    (hooked(), random(4, 5)),
    (F.relu, random(4, 5)),
    (made(5, 3), random(4, 5, dtype='d')),
    (made(5, 3), random(4, 5, 1)),
    (made(5, 3), random(4, 6)),
    (of_float64(), random(4, 5)),
    (of_float64(), random(4, 5, dtype='d')),
    (made(5, 3), chainer.Variable(random(4, 5)))])
def test_everything_else_is_left_to_chainer(layer, x):
    assert not is_plain(layer, (x,))
    assert not is_plain(layer, (x, x))


@pytest.mark.parametrize('looking', [
    Looking(), chainer.function_hooks.TimerHook(), chainer.DebugMode(True)])
def test_nobody_is_kept_from_looking_on(looking):
    layer, x = made(5, 3), random(4, 5)
    with looking:
        assert not is_plain(layer, (x,))
    with BatchStatistics():     # it looks at other links only
        assert is_plain(layer, (x,))


def test_a_wrong_shape_is_chainers_error():
    with pytest.raises(chainer.utils.type_check.InvalidType):
        record(made(5, 3), (random(4, 6),), (True,))


def test_a_layer_with_a_forward_of_its_own_is_asked():
    layer, x = made(5, 3), random(4, 5)
    assert is_plain(layer, (x,))
    layer.forward = lambda x: F.linear(x, layer.W, layer.b) * 2
    assert not is_plain(layer, (x,))
    _, (y,) = record(layer, (x,), (True,))
    assert np.allclose(y, 2 * forward(layer, x))
