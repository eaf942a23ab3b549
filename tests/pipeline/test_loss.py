"""The loss behind layers: its mean, gradient and weights, and metrics."""
import functools

from chainer_fp8pipe.pipeline.backprop import InParameters
from chainer_fp8pipe.pipeline.layers import (
    LayerError,
    LayersLoss,
    LayersPart,
    counting,
)
from chainer_fp8pipe.pipeline.randomness import Place
from chainer_fp8pipe.pipeline.stage import MeanLoss, weights_of

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PLACE = Place(0, 0, 0, 0)


def part_of(loss):
    """A layer that does nothing, and is not the first one."""
    part = LayersPart([(1, lambda x: x)])
    part.loss = loss
    return part


def run(functions, outputs, target, sizes, scale=None):
    """Means and the gradient, micro-batch by micro-batch."""
    ends = np.cumsum(sizes)[:-1]
    weights = functions.begin(np.split(target, ends))
    mean = MeanLoss()
    mean.begin(weights, sum(weights), scale)
    part, tapes = part_of(functions), []
    for number, y in enumerate(np.split(outputs, ends)):
        tape, loss = part.record(number, (y,), PLACE)
        mean.forward(number, loss)
        tapes.append(tape)
    gradients = [tape.backward(mean.backward(number), InParameters)[0]
                 for number, tape in enumerate(tapes)]
    means = {'loss': mean.sum / mean.weight} if mean.weight else {}
    for name in {name for name, _, _ in functions.found}:
        found = [(value, weight) for one, value, weight in functions.found
                 if one == name]
        if total := sum(weight for _, weight in found):
            means[name] = sum(value * weight for value, weight
                              in found) / total
    return means, np.concatenate(gradients)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5),
       st.integers(0, 5), st.booleans())
def test_parts_give_the_loss_and_gradient_of_the_whole(sizes, seed, ignoring):
    random = np.random.RandomState(seed)
    outputs = random.randn(sum(sizes), 3).astype('f')
    target = random.randint(-1 if ignoring else 0, 3, sum(sizes)).astype('i')
    whole = chainer.Variable(outputs)
    loss = F.softmax_cross_entropy(whole, target)
    loss.backward()
    means, gradient = run(LayersLoss(F.softmax_cross_entropy, {
        'accuracy': functools.partial(F.accuracy, ignore_label=-1)}, None),
        outputs, target, sizes)
    np.testing.assert_allclose(gradient, whole.grad, rtol=1e-5, atol=1e-7)
    if (target >= 0).any():
        assert means['loss'] == pytest.approx(float(loss.array), rel=1e-5)
        assert means['accuracy'] == pytest.approx(float(F.accuracy(
            outputs, target, ignore_label=-1).array), rel=1e-5)


def test_the_gradient_is_scaled_and_the_loss_is_not():
    outputs, target = np.ones((4, 2), 'f'), np.zeros((4, 2), 'f')
    functions = LayersLoss(F.mean_squared_error, {}, None)
    plain, gradient = run(functions, outputs, target, [2, 2])
    scaled, larger = run(functions, outputs, target, [2, 2], scale=64.0)
    assert scaled == plain
    np.testing.assert_allclose(larger, 64 * gradient)


def hidden(y, t):
    return 2 * F.softmax_cross_entropy(y, t)


def accuracy(y, t):
    return F.accuracy(y, t, ignore_label=-1)


def not_ignored(t):
    return (t != -1).sum()


@pytest.mark.parametrize(('loss', 'metrics', 'said'), [
    (hidden, {}, 'loss_weight=lambda t'),
    (F.softmax_cross_entropy, {'acc': accuracy}, "metrics={'acc': "),
    (F.softmax_cross_entropy, {'top5': lambda y, t: 1 / 0},
     "metric 'top5', micro-batch 0: ZeroDivisionError"),
    (lambda y, t: F.softmax_cross_entropy(y, t, reduce='no'), {},
     r'returned shape \(2,\); it must return a scalar'),
    (lambda y, t: None, {}, 'returned a NoneType; it must return a variable'),
    (lambda y, t: 1 / 0, {}, 'the loss, micro-batch 0: ZeroDivisionError')])
@pytest.mark.parametrize('graph', [True, False])
def test_a_loss_or_metric_that_has_no_mean_is_an_error(loss, metrics, said,
                                                       graph):
    """Also in evaluation, where there is no graph."""
    functions = LayersLoss(loss, metrics, None)
    functions.begin([np.array([0, -1], 'i')])
    with chainer.using_config('enable_backprop', graph), \
            chainer.using_config('train', graph), \
            pytest.raises(LayerError, match=said):
        part_of(functions).record(0, (np.zeros((2, 3), 'f'),), PLACE)


def test_weights_that_are_given_count_each_for_itself():
    functions = LayersLoss(hidden, {
        'own': (accuracy, not_ignored), 'accuracy': F.accuracy}, not_ignored)
    outputs = np.random.RandomState(0).randn(4, 3).astype('f')
    target = np.array([0, -1, 2, 1], 'i')
    means, _ = run(functions, outputs, target, [2, 2])
    assert means == pytest.approx({
        'loss': float(hidden(outputs, target).array),
        'own': float(accuracy(outputs, target).array),
        'accuracy': float(F.accuracy(outputs, target).array)}, rel=1e-5)


@pytest.mark.parametrize(('function', 'expected'), [
    (F.softmax_cross_entropy, 2),
    (functools.partial(F.softmax_cross_entropy, ignore_label=7), 3),
    (functools.partial(F.softmax_cross_entropy, normalize=False), 4),
    (functools.partial(functools.partial(
        F.softmax_cross_entropy, ignore_label=7), ignore_label=-1), 2),
    (F.sigmoid_cross_entropy, 2),
    (F.accuracy, 4),
    (functools.partial(F.accuracy, ignore_label=-1), 2),
    (F.mean_squared_error, 4),
    (lambda y, t: None, 4),
])
def test_what_a_function_counts_is_known_from_its_arguments(
        function, expected):
    assert counting(function)(np.array([0, -1, 7, -1])) == expected


#: Losses and metrics that hide what they leave out, and labels.
HIDDEN = {
    'a loss': (lambda y, t: F.sum(y) + 2 * F.softmax_cross_entropy(
        y, t, ignore_label=7), [0, 7, 1],
        r'pass loss_weight=lambda t: \(t != 7\)\.sum\(\)'),
    'with weights of classes': (lambda y, t: F.softmax_cross_entropy(
        y, t, ignore_label=7, class_weight=np.ones(9, 'f')), [0, 7, 1],
        r'pass loss_weight=lambda t: \(t != 7\)\.sum\(\)'),
    'a label that does not occur': (
        lambda y, t: F.softmax_cross_entropy(y, t), [0, 1, 1], None),
    'a mean over all samples': (lambda y, t: F.softmax_cross_entropy(
        y, t, normalize=False), [0, -1, 1], None),
    'another label': (lambda y, t: F.softmax_cross_entropy(
        y, t, ignore_label=7), [0, -1, 1], None),
}


@pytest.mark.parametrize('name', HIDDEN)
def test_an_ignored_label_is_found_behind_other_functions(name):
    function, labels, said = HIDDEN[name]
    for functions, text in (
            (LayersLoss(function, {}, None), said),
            (LayersLoss(lambda y, t: F.sum(y), {'acc': function}, None),
             said and r"pass metrics={'acc': \(function, lambda t: ")):
        functions.begin([np.array(labels, 'i')])
        part = part_of(functions)
        if text is None:
            part.record(0, (np.zeros((3, 9), 'f'),), PLACE)
            continue
        with pytest.raises(LayerError, match=text):
            part.record(0, (np.zeros((3, 9), 'f'),), PLACE)


def test_weights_are_labels_that_count_or_samples():
    assert weights_of([[], []], [5, 4]) == [5, 4]
    assert weights_of([[(5, 0)], [(4, 0)]], [5, 4]) == [5, 4]
    assert weights_of([[(2, 3)], [(4, 0)]], [5, 4]) == [2, 4]
    assert weights_of([[(0, 5)], [(0, 4)]], [5, 4]) == [0, 0]
    # Two losses that leave out in the same proportion.
    assert weights_of([[(2, 3), (4, 6)], [(3, 1), (6, 2)]], [5, 4]) == [2, 3]
    assert weights_of([[(-1, 1)]], [5]) == [5]


def test_weights_are_in_one_unit_on_all_replicas():
    """Though one of them has one micro-batch, or leaves out nothing."""
    assert weights_of([[(2, 3)]], [5], 2) == [2]
    assert weights_of([[(10, 0)], [(8, 0)]], [5, 4], 2) == [10, 8]
    assert weights_of([[(10, 0)], [(8, 0)]], [5, 4]) == [10, 8]
    assert weights_of([[(2, 3), (2, 3)]], [5], 2) == [2]
    assert weights_of([[(5, 0)], [(4, 0), (4, 0)]], [5, 4], 2) == [5, 4]
    with pytest.raises(ValueError, match='different numbers.*loss_weight'):
        weights_of([[(2, 3), (5, 0)]], [5], 2)


def test_weights_that_nobody_knows_are_an_error_with_a_remedy():
    with pytest.raises(ValueError, match='labels that the model computes '
                       'itself.*loss_weight='):
        weights_of([[(-1, 1)], [(-1, 1)]], [5, 4])
    for labels in ([[(2, 3), (5, 0)], [(4, 0), (4, 0)]],
                   [[(2, 3)], [(4, 0), (4, 0)]]):
        with pytest.raises(ValueError, match='different numbers.*loss_weight'):
            weights_of(labels, [5, 4])
