import functools

from chainer_fp8pipe.pipeline.counting import (
    counting,
    refuse_hidden_labels,
    samples,
)

import chainer
import chainer.functions as F
import numpy as np
import pytest


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


@pytest.mark.parametrize('shape', [(3,), (3, 2), (3, 0)])
def test_samples_are_the_length_of_a_target(shape):
    assert samples(np.zeros(shape)) == 3


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
