import functools

from chainer_fp8pipe.pipeline.layers import LayerError
from chainer_fp8pipe.pipeline.loss import (
    LossHead,
    counting,
    refuse_hidden_labels,
    samples,
)
from chainer_fp8pipe.pipeline.randomness import Place

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PLACE = Place(0, 0, 0, 0)


def run(head, outputs, target, sizes, scale=None):
    """Means and the gradient, micro-batch by micro-batch."""
    ends = np.cumsum(sizes)
    targets = np.split(target, ends[:-1])
    weights = head.count(targets)
    head.begin(targets, weights, sum(weights), scale)
    gradients = []
    for number, part in enumerate(np.split(outputs, ends[:-1])):
        head.forward(number, (part,), PLACE)
    for number in range(len(sizes)):
        gradients.append(head.backward(number)[0])
    means = {name: head.sums[name] / head.totals[name]
             for name in head.names if head.totals[name]}
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
    head = LossHead(F.softmax_cross_entropy, {
        'accuracy': functools.partial(F.accuracy, ignore_label=-1)}, None)
    means, gradient = run(head, outputs, target, sizes)
    np.testing.assert_allclose(gradient, whole.grad, rtol=1e-5, atol=1e-7)
    if (target >= 0).any():
        assert means['loss'] == pytest.approx(float(loss.array), rel=1e-5)
        assert means['accuracy'] == pytest.approx(float(F.accuracy(
            outputs, target, ignore_label=-1).array), rel=1e-5)


def test_the_gradient_is_scaled_and_the_loss_is_not():
    outputs = np.ones((4, 2), 'f')
    target = np.zeros((4, 2), 'f')
    head = LossHead(F.mean_squared_error, {}, None)
    plain, gradient = run(head, outputs, target, [2, 2])
    scaled, larger = run(head, outputs, target, [2, 2], scale=64.0)
    assert scaled == plain
    np.testing.assert_allclose(larger, 64 * gradient)


def test_a_function_that_hides_what_it_ignores_is_an_error():
    head = LossHead(lambda y, t: 2 * F.softmax_cross_entropy(y, t), {}, None)
    outputs = np.zeros((2, 3), 'f')
    run(head, outputs, np.array([0, 1], 'i'), [1, 1])
    with pytest.raises(LayerError, match='loss_weight=lambda t'):
        run(head, outputs, np.array([0, -1], 'i'), [1, 1])


def test_a_weight_that_is_given_counts():
    head = LossHead(lambda y, t: F.softmax_cross_entropy(y, t), {},
                    lambda t: (t != -1).sum())
    outputs = np.random.RandomState(0).randn(4, 3).astype('f')
    target = np.array([0, -1, 2, 1], 'i')
    means, _ = run(head, outputs, target, [2, 2])
    expected = F.softmax_cross_entropy(outputs, target).array
    assert means['loss'] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(('loss', 'said'), [
    (lambda y, t: F.softmax_cross_entropy(y, t, reduce='no'),
     r'returned shape \(2,\); it must return a scalar'),
    (lambda y, t: None, 'returned a NoneType; it must return a variable'),
    (lambda y, t: 1 / 0, 'the loss, micro-batch 0: ZeroDivisionError'),
])
def test_a_loss_that_is_no_scalar_is_an_error(loss, said):
    head = LossHead(loss, {}, samples)
    with pytest.raises(LayerError, match=said):
        run(head, np.zeros((2, 3), 'f'), np.zeros(2, 'i'), [2])


def test_a_metric_that_fails_is_named():
    head = LossHead(F.softmax_cross_entropy,
                    {'top5': lambda y, t: 1 / 0}, None)
    with pytest.raises(LayerError, match="metric 'top5', micro-batch 0"):
        run(head, np.zeros((2, 3), 'f'), np.zeros(2, 'i'), [2])


def test_a_metric_that_hides_what_it_ignores_is_an_error():
    outputs = np.zeros((2, 3), 'f')
    target = np.array([0, -1], 'i')

    def accuracy(y, t):
        return F.accuracy(y, t, ignore_label=-1)
    head = LossHead(F.softmax_cross_entropy, {'acc': accuracy}, None)
    with pytest.raises(LayerError, match="metrics={'acc': "):
        run(head, outputs, target, [1, 1])
    head = LossHead(F.softmax_cross_entropy, {
        'acc': (accuracy, lambda t: (t != -1).sum())}, None)
    means, _ = run(head, outputs, target, [1, 1])
    assert means['acc'] == 1


def test_what_is_ignored_is_found_without_a_graph_too():
    head = LossHead(lambda y, t: F.softmax_cross_entropy(y, t), {}, None)
    target = np.array([0, -1], 'i')
    head.begin([target], [2.0], 2.0, None)
    with chainer.no_backprop_mode(), pytest.raises(
            LayerError, match='loss_weight'):
        head.forward(0, (np.zeros((2, 3), 'f'),), PLACE)


def test_the_weight_of_the_loss_is_not_that_of_the_metrics():
    head = LossHead(F.softmax_cross_entropy, {'accuracy': F.accuracy},
                    lambda t: (t != -1).sum())
    outputs = np.eye(4, 3).astype('f')
    target = np.array([0, -1, -1, 0], 'i')
    means, _ = run(head, outputs, target, [2, 2])
    assert means['accuracy'] == pytest.approx(
        float(F.accuracy(outputs, target).array))


def test_what_the_loss_draws_depends_on_the_place():
    drawn = []

    def loss(y, t):
        drawn.append(np.random.rand())
        return F.mean_squared_error(y, y * 0)
    head = LossHead(loss, {}, samples)
    for iteration in (0, 1, 0):
        head.begin([np.zeros(2)], [2.0], 2.0, None)
        head.forward(0, (np.ones((2, 3), 'f'),),
                     Place(0, iteration, 5, 0))
    assert drawn[0] == drawn[2] != drawn[1]


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


@pytest.mark.parametrize(('name', 'remedy'), [
    ('loss', r'pass loss_weight=lambda t: \(t != 7\)\.sum\(\)'),
    ('acc', r"pass metrics={'acc': \(function, lambda t: \(t != 7\)"),
])
def test_an_ignored_label_is_found_behind_other_functions(name, remedy):
    scores = chainer.Variable(np.zeros((3, 2), 'f'))
    labels = np.array([0, 7, 1], 'i')
    loss = F.softmax_cross_entropy(scores, labels, ignore_label=7)
    with pytest.raises(ValueError, match=remedy):
        refuse_hidden_labels(name, F.sum(scores) + 2 * loss, labels)


@pytest.mark.parametrize(('labels', 'options'), [
    ([0, 1, 1], {}),                        # the label does not occur
    ([0, -1, 1], {'normalize': False}),     # a mean over all samples
    ([0, 7, 1], {'ignore_label': None}),
])
def test_a_mean_over_all_samples_is_not_refused(labels, options):
    scores = chainer.Variable(np.zeros((3, 9), 'f'))
    labels = np.array(labels, 'i')
    refuse_hidden_labels('loss', F.softmax_cross_entropy(
        scores, labels, **options), labels)


def test_values_without_a_graph_are_not_refused():
    refuse_hidden_labels('acc', chainer.Variable(np.zeros(())),
                         np.array([-1]))
