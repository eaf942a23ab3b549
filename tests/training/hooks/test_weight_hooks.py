from chainer_fp8pipe import lazy
from chainer_fp8pipe.links import Divisible
from chainer_fp8pipe.training.hooks import LARS, WeightDecay, is_weight

import chainer
import chainer.links as L
import numpy
import pytest
from chainer.optimizer_hooks import GradientLARS
from chainermn.links import MultiNodeBatchNormalization
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from .helpers import model_of, step

W = numpy.array([[3, 0], [0, 4]], 'f4')         # of norm 5
G = numpy.array([[0, 6], [8, 0]], 'f4')         # of norm 10


def paper(weight, gradient, coefficient, decay):
    """Equation 6 with weight decay, and the gradient's part of 7."""
    weight, gradient = weight.astype(float), gradient.astype(float)
    norm = numpy.sqrt((weight ** 2).sum())
    rate = coefficient * norm / (
        numpy.sqrt((gradient ** 2).sum()) + decay * norm)
    return rate * (gradient + decay * weight)


def test_a_weights_step_is_a_share_of_its_norm():
    change = step(LARS(0.01), {'W': G}, W=W)['W']
    assert_allclose(change, -0.01 * 5 / 10 * G, rtol=1e-6)
    assert numpy.linalg.norm(change) == pytest.approx(0.05)


@settings(max_examples=60)
@given(st.integers(0, 2 ** 32 - 1), st.integers(1, 5), st.integers(1, 300),
       st.floats(1e-5, 10), st.floats(0, 1), st.floats(-6, 6),
       st.sampled_from(['f4', 'f8']))
def test_lars_equals_the_papers_equation(
        seed, rows, columns, coefficient, decay, power, dtype):
    generator = numpy.random.default_rng(seed)
    weight = generator.normal(size=(rows, columns)).astype(dtype)
    gradient = (generator.normal(size=weight.shape)
                * 10.0 ** power).astype(dtype)
    expected = paper(weight, gradient, coefficient, decay)
    found = LARS(coefficient, decay).changed(numpy, weight, gradient)
    assert found.dtype == dtype
    assert_allclose(found, expected, rtol=2e-5, atol=2e-6 * max(
        abs(expected).max(), 1e-30))


def test_the_learning_rate_is_inside_of_the_momentum():
    """v <- m v - lr g: a later, smaller rate does not slow v down."""
    model = model_of(W=W)
    optimizer = chainer.optimizers.MomentumSGD(2.0, 0.9).setup(model)
    optimizer.add_hook(LARS(0.01, 0.1))
    weight, velocity = W.astype(float), 0
    for rate in (2.0, 0.5, 0.1):
        optimizer.lr = rate
        model.W.grad = G.copy()
        optimizer.update()
        velocity = 0.9 * velocity - rate * paper(weight, G, 0.01, 0.1)
        weight = weight + velocity
        assert_allclose(model.W.array, weight, rtol=1e-5)


@pytest.mark.parametrize(('hook', 'change'), [
    (LARS(0.01, 0.1), -0.01 * 5 / 10.5 * (G + 0.1 * W)),
    (WeightDecay(0.1), -(G + 0.1 * W))])
def test_biases_and_normalisations_have_plain_gradients(hook, change):
    arrays = {'W': W, 'b': W, 'gamma': W, 'beta': W, 'V': W[0]}
    changes = step(hook, dict.fromkeys(arrays, G) | {'V': G[0]}, **arrays)
    assert_allclose(changes['W'], change, rtol=1e-4)
    for name in ('b', 'gamma', 'beta'):
        assert_allclose(changes[name], -G)
    assert_allclose(changes['V'], -G[0])


def test_a_weight_of_zeros_can_leave_zero():
    assert_allclose(step(LARS(), {'W': G}, W=0 * W)['W'], -G)
    assert_allclose(step(LARS(0.001, 1.0), {'W': G}, W=0 * W)['W'], -G)


def test_a_gradient_of_zeros_leaves_the_decay():
    assert_allclose(step(LARS(), {'W': 0 * G}, W=W)['W'], 0 * W)
    assert_allclose(step(LARS(0.01, 0.5), {'W': 0 * G}, W=W)['W'], -0.01 * W,
                    rtol=1e-5)


@pytest.mark.parametrize('scale', [None, 1.0, 128.0, 65504.0])
@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_does_not_change_lars(scale, dtype):
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    gradient = G / 65504
    change = step(LARS(0.5), {'W': gradient}, optimizer, scale,
                  W=W.astype(dtype))['W']
    assert_allclose(change, -0.5 * 5 / 10 * G, rtol=2e-2, atol=2e-3)


def test_norms_of_float16_do_not_overflow():
    large = numpy.full((300, 300), 300, 'f2')
    change = step(LARS(0.5), {'W': large}, W=large / 64)['W']
    assert_allclose(change, -0.5 * large / 64)


def test_a_gradient_that_is_not_finite_is_not_hidden():
    bad = G.copy()
    for value in (numpy.nan, numpy.inf):
        bad[0, 0] = value
        with numpy.errstate(invalid='ignore'):
            assert not numpy.isfinite(step(LARS(), {'W': bad}, W=W)['W'][0, 0])


def test_the_gradients_array_is_left_alone():
    """Two parameters may have the same one."""
    model = model_of(W=W, V=W)
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(LARS(0.01))
    model.W.grad = model.V.grad = gradient = G.copy()
    gradient.flags.writeable = False
    optimizer.update()
    assert_allclose(model.W.array, model.V.array)


def test_one_weight_may_have_a_coefficient_of_its_own():
    model = model_of(W=W, V=W)
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    model.V.update_rule.add_hook(LARS(0.02))
    optimizer.add_hook(LARS(0.01))
    for _ in range(2):
        model.W.grad, model.V.grad = G.copy(), G.copy()
        model.W.array[...] = model.V.array[...] = W
        optimizer.update()
    assert_allclose(model.V.array - W, 2 * (model.W.array - W), rtol=1e-3)


@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_does_not_change_weight_decay(dtype):
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    change = step(WeightDecay(0.1), {'W': G}, optimizer, 1024.0,
                  W=W.astype(dtype))['W']
    assert_allclose(change, -(G + 0.1 * W), rtol=3e-3)


def test_bad_numbers_are_errors():
    with pytest.raises(ValueError, match='coefficient of LARS must be'):
        LARS(0)
    with pytest.raises(ValueError, match='weight_decay must be'):
        LARS(0.001, -1e-4)
    with pytest.raises(ValueError, match='weight_decay must be'):
        LARS(0.001, float('nan'))
    with pytest.raises(ValueError, match='weight_decay must be a finite'):
        WeightDecay(-1)


# --- what is a weight --------------------------------------------------------

def names_of_weights(link):
    return [name for name, parameter in sorted(link.namedparams())
            if is_weight(parameter)]


def test_weights_are_told_from_the_rest_in_chainers_links():
    model = chainer.Chain(
        linear=L.Linear(3, 2), convolution=L.Convolution2D(1, 2, 3),
        embedding=L.EmbedID(3, 2), lstm=L.LSTM(2, 2),
        batch=L.BatchNormalization(2), again=L.BatchRenormalization(2),
        layer=L.LayerNormalization(2), group=L.GroupNormalization(1, 2),
        slope=L.PReLU(), bias=L.Bias(1, (2, 3)), scale=L.Scale(1, (2,)))
    assert names_of_weights(model) == [
        '/convolution/W', '/embedding/W', '/linear/W', '/lstm/lateral/W',
        '/lstm/upward/W']


def test_parameters_of_normalisations_may_have_several_dimensions():
    model = chainer.Sequential(
        L.BatchNormalization(axis=0, size=(2, 3)),
        L.LocalConvolution2D(1, 2, in_size=4, ksize=3))
    assert model[0].gamma.ndim == 2
    assert model[1].b.ndim == 3
    assert names_of_weights(model) == ['/1/W']


def test_parameters_of_chainermns_normalisation_are_no_weights():
    link = MultiNodeBatchNormalization((2, 3), _Alone())
    assert names_of_weights(link) == []


class _Alone:
    size = 1


def test_parameters_that_get_their_shape_late_are_judged_then():
    model = chainer.Sequential(L.Linear(None, 2))
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(LARS(0.01))
    model.cleargrads()
    optimizer.update()
    for _ in range(2):
        y = model(numpy.ones((1, 3), 'f4'))
        before = model[0].W.array.copy()
        model.cleargrads()
        y.grad = numpy.ones_like(y.array)
        y.backward()
        optimizer.update()
        change = numpy.linalg.norm(model[0].W.array - before)
        numpy.testing.assert_allclose(
            change, 0.01 * numpy.linalg.norm(before), rtol=1e-5)


def test_layers_that_are_built_late_are_weights_too():
    model = Divisible(lazy(L.Linear, 3, 2), lazy(L.BatchNormalization, 2))
    assert names_of_weights(model.divide(0, 2)) == ['/0/W']


# --- Chainer's own: where it is right, and where it is not -------------------

@settings(max_examples=30)
@given(st.integers(0, 2 ** 32 - 1), st.floats(1e-3, 10), st.floats(0, 1))
def test_chainers_is_the_same_for_float32_weights(seed, coefficient, decay):
    """The coefficient is then a factor of the learning rate."""
    generator = numpy.random.default_rng(seed)
    weight = generator.normal(size=(5, 7)).astype('f4')
    gradient = generator.normal(size=weight.shape).astype('f4')
    theirs = step(GradientLARS(weight_decay=decay), {'W': gradient},
                  chainer.optimizers.SGD(coefficient), W=weight)['W']
    ours = step(LARS(coefficient, decay), {'W': gradient}, W=weight)['W']
    assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def test_chainers_takes_biases_for_weights():
    change = step(GradientLARS(), {'b': G[0]}, b=W[0])['b']
    assert_allclose(change, -G[0] * 3 / 6)


def test_chainers_divides_the_step_by_the_loss_scale():
    plain = step(GradientLARS(), {'W': G}, W=W)['W']
    scaled = step(GradientLARS(), {'W': G}, scale=1024.0, W=W)['W']
    assert_allclose(1024 * scaled, plain, rtol=1e-5)


def test_chainers_norms_overflow_in_float16():
    """Above 255, so that nothing is learnt, without a word."""
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    with numpy.errstate(over='ignore', invalid='ignore'):
        change = step(GradientLARS(), {'W': 100 * G}, optimizer,
                      W=W.astype('f2'))['W']
    assert_allclose(change, 0)


def test_chainers_leaves_small_weights_to_plain_descent():
    """A norm below 0.01 is no norm to it."""
    small = step(GradientLARS(), {'W': G}, W=W / 501)['W']
    assert_allclose(small, -G)
    less_small = step(GradientLARS(), {'W': G}, W=W / 499)['W']
    assert_allclose(less_small, -G * 5 / 499 / 10, rtol=1e-3)


def test_chainers_weight_decay_before_it_is_another_equation():
    """Of the norm of the sum, not of the sum of the norms."""
    model = model_of(W=W)
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(2.0))
    optimizer.add_hook(GradientLARS())
    model.W.grad = G.copy()
    optimizer.update()
    total = G + 2 * W
    assert_allclose(model.W.array - W,
                    -total * 5 / numpy.linalg.norm(total), rtol=1e-5)
    assert_allclose(step(LARS(1.0, 2.0), {'W': G}, W=W)['W'],
                    -total * 5 / 20, rtol=1e-5)


def test_chainers_on_an_update_rule_decays_by_the_loss_scale():
    """Why it cannot be used there, where it could leave out biases."""
    def join(optimizer):
        rule = optimizer.target.W.update_rule
        rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    join.timing, join.call_for_each_param = 'pre', False
    change = step(join, {'W': G}, scale=1024.0, W=W)['W']
    assert_allclose(change, -(G + 1024 * 0.1 * W), rtol=1e-5)
