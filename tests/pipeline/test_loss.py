"""The loss behind layers: its mean, gradient, weights and reports."""
import types

from chainer_fp8pipe import Divisible
from chainer_fp8pipe.pipeline.adapter import LayersAdapter
from chainer_fp8pipe.pipeline.backprop import InParameters
from chainer_fp8pipe.pipeline.layers import LayerError, LayersPart
from chainer_fp8pipe.pipeline.means import weights_of
from chainer_fp8pipe.pipeline.randomness import Place

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PLACE = Place(0, 0, 0, 0)


def adapter_of(loss=None):
    """The adapter of a layer on one rank, with a loss function."""
    return LayersAdapter(
        Divisible(F.identity).share(0, 1),
        types.SimpleNamespace(stage_index=0, stages=1), loss_func=loss)


def part_of(adapter):
    """A layer that does nothing, and is not the first one."""
    part = LayersPart([(1, lambda x: x)])
    part.loss = adapter.loss
    return part


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5),
       st.integers(0, 5), st.booleans(), st.sampled_from([None, 64.0]))
def test_parts_give_the_loss_and_gradient_of_the_whole(
        sizes, seed, ignoring, scale):
    random = np.random.RandomState(seed)
    outputs = random.randn(sum(sizes), 3).astype('f')
    target = random.randint(-1 if ignoring else 0, 3, sum(sizes)).astype('i')
    whole = chainer.Variable(outputs)
    loss = F.softmax_cross_entropy(whole, target)
    loss.backward()
    functions = adapter_of()
    ends, mean, gradients = np.cumsum(sizes)[:-1], 0, []
    functions.begin(np.split(target, ends))
    shares = np.divide(functions.weights, sum(functions.weights) or 1)
    part = part_of(functions)
    for number, y in enumerate(np.split(outputs, ends)):
        tape, (found,) = part.record(number, (y,), PLACE)
        mean += found * shares[number]
        gradients += tape.backward((np.full_like(
            found, shares[number] * (scale or 1)),), InParameters)
    np.testing.assert_allclose(
        np.concatenate(gradients), whole.grad * (scale or 1), rtol=1e-5,
        atol=1e-5)
    if (target >= 0).any():
        assert mean == pytest.approx(float(loss.array), rel=1e-5)
        accuracy = F.accuracy(outputs, target)
        assert functions._found['accuracy'].mean() == (
            pytest.approx(float(accuracy.array), rel=1e-5))


def hidden(y, t):
    return 2 * F.softmax_cross_entropy(y, t, ignore_label=1)


WEIGHT = r'pass loss_weight=lambda t: \(t != 1\)\.sum\(\)'


@pytest.mark.parametrize(('loss', 'said'), [
    (hidden, WEIGHT),
    (lambda y, t: F.sigmoid_cross_entropy(y, t[:, None] * [1, 1, 1] - 1),
     WEIGHT.replace('1', '-1')),
    (lambda y, t: F.softmax_cross_entropy(
        y, t, ignore_label=1, class_weight=np.ones(3, 'f')), WEIGHT),
    (lambda y, t: F.softmax_cross_entropy(y, t, reduce='no'),
     r'returned Variable of shape \(2,\); it must return a scalar'),
    (lambda y, t: None, 'returned NoneType of .* return a scalar variable'),
    (lambda y, t: 1 / 0, 'the loss, micro-batch 0: ZeroDivisionError'),
    # A label that does not occur, and a mean over all samples.
    (lambda y, t: F.softmax_cross_entropy(y, t, ignore_label=7), None),
    (lambda y, t: F.softmax_cross_entropy(
        y, t, normalize=False, ignore_label=1), None)])
@pytest.mark.parametrize('graph', [True, False])
def test_a_loss_that_has_no_mean_is_an_error(loss, said, graph):
    """Also in evaluation, where there is no graph."""
    functions = adapter_of(loss)
    functions.begin([np.array([0, 1], 'i')])

    def run():
        part_of(functions).record(0, (np.zeros((2, 3), 'f'),), PLACE)
    with chainer.using_config('enable_backprop', graph), \
            chainer.using_config('train', graph):
        if said is None:
            run()
            return
        with pytest.raises(LayerError, match=said):
            run()


@pytest.mark.parametrize(('function', 'expected'), [
    (F.softmax_cross_entropy, 2), (F.mean_squared_error, 4)])
def test_labels_count_in_the_usual_loss_and_samples_in_others(
        function, expected):
    functions = adapter_of(function)
    functions.begin([np.array([0, -1, 7, -1]), np.zeros(9)])
    assert functions.weights == [expected, 9]


@pytest.mark.parametrize(('labels', 'sizes', 'replicas', 'weights'), [
    ([[], []], [5, 4], 1, [5, 4]),
    ([[(5, 0)], [(4, 0)]], [5, 4], 1, [5, 4]),
    ([[(2, 3)], [(4, 0)]], [5, 4], 1, [2, 4]),
    ([[(0, 5)], [(0, 4)]], [5, 4], 1, [0, 0]),
    ([[(2, 3), (2, 3)], [(3, 1), (3, 1)]], [5, 4], 1, [2, 3]),
    ([[(-1, 1)]], [5], 1, [5]),
    # In one unit on all replicas.
    ([[(2, 3)]], [5], 2, [2]), ([[(2, 3), (2, 3)]], [5], 2, [2]),
    ([[(10, 0)], [(8, 0)]], [5, 4], 2, [10, 8]),
    ([[(5, 0)], [(4, 0), (4, 0)]], [5, 4], 2, [5, 4]),
    ([[(2, 3), (5, 0)]], [5], 2, 'different numbers.*loss_weight='),
    ([[(2, 3), (5, 0)], [(4, 0), (4, 0)]], [5, 4], 1, 'different numbers'),
    ([[(2, 3)], [(4, 0), (4, 0)]], [5, 4], 1, 'different numbers'),
    ([[(-1, 1)], [(-1, 1)]], [5, 4], 1,
     'labels that the model computes itself.*loss_weight=')])
def test_weights_are_labels_that_count_or_samples(labels, sizes, replicas,
                                                  weights):
    if isinstance(weights, list):
        assert weights_of(labels, sizes, replicas)[0] == weights
        return
    with pytest.raises(ValueError, match=weights):
        weights_of(labels, sizes, replicas)
