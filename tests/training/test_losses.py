import functools
import warnings

from chainer_fp8pipe import Divisible
from chainer_fp8pipe.training.losses import smoothed_cross_entropy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tests.ranks import on_ranks
from tests.training.trainers import Job


def reference(x, t, smoothing, ignore_label=-1):
    """Mean loss and its gradient, sample by sample in float64."""
    x = numpy.moveaxis(x.astype(float), 1, -1)
    classes = x.shape[-1]
    gradient, losses = numpy.zeros_like(x), []
    for index in numpy.ndindex(t.shape):
        if t[index] == ignore_label:
            continue
        log = x[index] - x[index].max()
        log = log - numpy.log(numpy.exp(log).sum())
        target = numpy.full(classes, smoothing / classes)
        target[t[index]] += 1 - smoothing
        losses.append(-(target * log).sum())
        gradient[index] = numpy.exp(log) - target
    count = max(len(losses), 1)
    return sum(losses) / count, numpy.moveaxis(gradient, -1, 1) / count


def scores(seed, shape, dtype):
    return numpy.random.default_rng(seed).normal(0, 3, shape).astype(dtype)


@settings(max_examples=60)
@given(st.integers(0, 2 ** 32 - 1), st.integers(1, 6), st.integers(1, 5),
       st.sampled_from([(), (3,), (2, 3)]), st.floats(0, 0.99),
       st.sampled_from(['f2', 'f4', 'f8']), st.sampled_from([-1, 0, 255]))
def test_loss_and_gradient_are_those_of_the_definition(
        seed, samples, classes, rest, smoothing, dtype, ignore_label):
    x = chainer.Variable(scores(seed, (samples, classes, *rest), dtype))
    choices = numpy.append(numpy.arange(classes), ignore_label)
    t = numpy.random.default_rng(seed + 1).choice(
        choices, (samples, *rest)).astype('i4')
    loss = smoothed_cross_entropy(x, t, smoothing, ignore_label)
    loss.backward()
    expected, gradient = reference(x.array, t, smoothing, ignore_label)
    assert loss.shape == ()
    assert loss.dtype == (numpy.float64 if dtype == 'f8' else numpy.float32)
    assert_allclose(loss.array, expected, rtol=1e-5, atol=1e-6)
    assert x.grad.dtype == x.dtype
    assert_allclose(x.grad, gradient, rtol=2e-3 if dtype == 'f2' else 1e-4,
                    atol=1e-4 if dtype == 'f2' else 1e-6)


def test_smoothing_of_zero_is_chainers_cross_entropy():
    x, t = scores(0, (7, 4), 'f4'), numpy.arange(7, dtype='i4') % 4
    t[2] = -1
    assert_allclose(smoothed_cross_entropy(x, t, 0).array,
                    F.softmax_cross_entropy(x, t).array, rtol=1e-6)
    x[:, 3], t[3] = -numpy.inf, 0       # a class that is left out
    found = smoothed_cross_entropy(x, numpy.minimum(t, 2), 0).array
    assert numpy.isfinite(found)


def test_the_loss_of_no_samples_is_zero():
    x = chainer.Variable(scores(2, (3, 2), 'f4'))
    loss = smoothed_cross_entropy(x, numpy.full(3, -1, 'i4'))
    loss.backward()
    assert loss.array == 0
    assert (x.grad == 0).all()
    assert smoothed_cross_entropy(
        scores(2, (0, 2), 'f4'), numpy.zeros(0, 'i4')).array == 0


@pytest.mark.parametrize(('t', 'smoothing', 'message'), [
    ([0, 3], 0.1, 'label 3 is none of the 3 classes'),
    ([0, -2], 0.1, 'label -2 is none of the 3 classes and not ignore_label'),
    ([0], 0.1, r'labels of shape \(1,\) do not fit scores of shape'),
    ([0, 1.5], 0.1, 'labels must be integers'),
    ([0, 1], 1.0, 'smoothing must be at least 0 and less than 1, not 1.0'),
    ([0, 1], float('nan'), 'smoothing must be')])
def test_bad_input_is_an_error(t, smoothing, message):
    with pytest.raises(ValueError, match=message):
        smoothed_cross_entropy(scores(3, (2, 3), 'f4'),
                               numpy.array(t), smoothing)


def test_no_score_of_an_ignored_sample_counts():
    x = numpy.array([[0, -numpy.inf], [1, 2]], 'f4')
    found = smoothed_cross_entropy(x, numpy.array([-1, 1], 'i4'))
    assert found.array == smoothed_cross_entropy(
        x[1:], numpy.array([1], 'i4')).array


@pytest.mark.parametrize('is_chain', [False, True])
@on_ranks(1, 2)
def test_micro_batches_are_weighed_by_what_counts(comm, is_chain):
    x = numpy.random.default_rng(0).normal(size=(12, 4)).astype('f4')
    t = numpy.array([0, 1, -1, 2, -1, -1, 1, 0, 2, 2, 1, -1], 'i4')
    layers = (L.Linear(4, 5, initialW=0.1), F.tanh,
              L.Linear(5, 3, initialW=0.2))
    loss = functools.partial(smoothed_cross_entropy, smoothing=0.2)
    expected = loss(chainer.Sequential(*layers)(x), t).array
    network, options = lambda: L.Classifier(
        chainer.Sequential(*layers), loss), {}
    if not is_chain:
        network, options = lambda: Divisible(*layers), {
            'loss_func': loss, 'loss_weight': lambda t: (t != -1).sum()}
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)     # it is a mean
        seen, = Job(comm, network, data=(x, t), micro_batches=4,
                    **options).update()
    assert_allclose(seen['main/loss'], expected, rtol=1e-6)
