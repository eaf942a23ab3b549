"""Models of tests.models: schedules, recomputation, weights, evaluation."""

import chainer
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    Both,
    batch_of,
    make,
    observed,
    running,
    updater_of,
    values,
)


def learning(model):
    return chainer.optimizers.SGD(.1).setup(model)


def both_of(comm, name, *batches, **options):
    return Both(comm, lambda: make(name), *(batches or [batch_of(name)]),
                optimizer=learning, **options)


@on_ranks(2)
def test_a_shared_parameter_is_clipped_as_often_as_links_have_it(comm):
    def clipping(model):
        optimizer = learning(model)
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.01))
        return optimizer

    Both(comm, lambda: make('shared_parameters'),
         batch_of('shared_parameters'), optimizer=clipping,
         tolerance=1e-5).update(2)


@pytest.mark.parametrize('name', ['encoder', 'conditional'])
@on_ranks(2)
def test_recomputation_changes_nothing(comm, name):
    """Not one bit: masks, running statistics, reports."""
    found = []
    for recompute in (False, True):
        model = make(name)
        updater = updater_of(comm, model, [batch_of(name), batch_of(name, 2)],
                             cut={'recompute': recompute})
        assert any(model.plan.recompute) == recompute
        reports = [observed(model, updater.update) for _ in range(2)]
        found.append((reports, values(comm, model), running(comm, model)))
    plain, again = found
    assert plain[0] == again[0]
    for one, other in zip(plain[1:], again[1:], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            numpy.testing.assert_array_equal(value, other[key], key)


@on_ranks(2)
def test_micro_batches_count_by_their_labels(comm):
    """Most labels of the first one are ignored."""
    image, label = batch_of('segmentation')
    few, none = label.copy(), label.copy()
    few[:4, :, 1:], none[:4] = -1, -1       # of which none of it counts
    both_of(comm, 'segmentation', (image, few), (image, none)).update()


class Ignoring(chainer.Chain):
    """A loss that ignores labels which the model computes itself."""

    def __init__(self):
        super().__init__(teacher=chainer.links.Linear(4, 3),
                         student=chainer.links.Linear(4, 3))

    def forward(self, x):
        y = self.teacher(x).array
        label = numpy.where(y.max(axis=1) > .5, y.argmax(axis=1), -1)
        return chainer.functions.softmax_cross_entropy(
            self.student(x), label.astype('i'), ignore_label=-1)


@on_ranks(2)
def test_labels_that_nobody_knows_before_need_a_weight(comm):
    x = numpy.random.RandomState(0).randn(8, 4).astype('f')
    updater = updater_of(comm, Ignoring(), [(x,)])
    with pytest.raises(ValueError, match='labels that the model computes '
                       'itself.*loss_weight='):
        updater.update()
    updater = updater_of(comm, Ignoring(), [(x,)], loss_weight=len)
    updater.update()


@on_ranks(2)
def test_a_weight_of_ones_own_is_a_function_of_the_batch(comm):
    Both(comm, lambda: make('keyword_tagger'), batch_of('keyword_tagger'),
         weight=lambda few: float(few['mask'].sum()),
         loss_weight=lambda x, t, mask: mask.sum()).update()


@on_ranks(2)
def test_a_batch_of_another_form_is_traced_and_trained(comm):
    """Longer sentences, other trees, fewer samples, one after the other."""
    for name in ('seq2seq', 'tree_lstm'):
        batches = [batch_of(name, seed) for seed in (1, 2)]
        if name == 'seq2seq':
            source, target = batches[1]
            batches.append((source[:6, :4], target[:6, :5]))
        both_of(comm, name, *batches).update()
