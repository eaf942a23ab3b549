from chainer_fp8pipe.links import Divisible

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.trainers import bits
from tests.training.updaters.networks import (
    NETWORKS,
    Normalised,
    Plain,
    dataset,
)
from tests.training.updaters.test_pipeline_updater import make_updater, update


def serially(network, inputs, labels, batch):
    """What Chainer's Evaluator gives for the whole model."""
    model = L.Classifier(network())
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(inputs, labels), batch, repeat=False,
        shuffle=False)
    return extensions.Evaluator(iterator, model)()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('network', ['Plain', 'Noisy'])
def test_the_evaluator_gives_what_it_gives_serially(comm, network):
    inputs, labels = dataset(23)
    updater = make_updater(comm, NETWORKS[network], (inputs, labels),
                           micro_batches=4)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(inputs, labels), 10, repeat=False,
        shuffle=False)      # a short last batch of 3
    evaluator = extensions.Evaluator(
        iterator, updater.get_optimizer('main').target,
        eval_func=updater.evaluate)
    expected = serially(NETWORKS[network], inputs, labels, 10)
    first = evaluator()
    assert first == pytest.approx(expected, rel=1e-5)
    update(updater)         # learning rate 0
    assert evaluator() == first
    assert comm.allgather(first) == [first] * comm.size


class Inputs(chainer.LinkHook):
    """Notes what batch normalisation gets."""

    def __init__(self):
        self.seen = {}

    def forward_preprocess(self, args):
        if isinstance(args.link, L.BatchNormalization):
            self.seen.setdefault(args.link, []).append(args.args[0].array)


def train_serially(model, data, sizes, optimizer, updates):
    """Chainer, with the parts of a batch on one graph.

    The links of batch normalisation see each part, for the graph, and then
    the whole batch, for their running averages.
    """
    optimizer.setup(model)
    inputs, labels = (np.split(array, np.cumsum(sizes)[:-1])
                      for array in data)
    normalising = [link for link in model.links()
                   if isinstance(link, L.BatchNormalization)]
    for _ in range(updates):
        before = [(link.avg_mean.copy(), link.avg_var.copy())
                  for link in normalising]
        with chainer.using_config('train', True), Inputs() as hook:
            loss = sum(F.softmax_cross_entropy(model(x), t) * len(x)
                       for x, t in zip(inputs, labels, strict=True))
        for link, (mean, variance) in zip(normalising, before, strict=True):
            link.avg_mean[...], link.avg_var[...] = mean, variance
            with chainer.using_config('train', True):
                link(np.concatenate(hook.seen[link]))
        model.cleargrads()
        (loss / sum(sizes)).backward()
        optimizer.update()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('recompute', [False, True])
def test_an_evaluation_after_training_uses_the_statistics_of_the_batches(
        comm, recompute):
    data = dataset(14)
    whole = Normalised()
    train_serially(whole, data, [5, 5, 4],
                   chainer.optimizers.MomentumSGD(0.1), 3)
    optimizer = chainer.optimizers.MomentumSGD(0.1)
    updater = make_updater(comm, Normalised, data, optimizer,
                           micro_batches=3, recompute=recompute)
    for _ in range(3):
        update(updater)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*data), 6, repeat=False, shuffle=False)
    found = extensions.Evaluator(iterator, optimizer.target,
                                 eval_func=updater.evaluate)()
    assert found == pytest.approx(serially(lambda: whole, *data, 6), rel=1e-4)
    assert found != pytest.approx(serially(Normalised, *data, 6), rel=1e-2)


@on_ranks(1, 2)
def test_only_the_first_ranks_arrays_count(comm):
    inputs, labels = dataset(12)
    updater = make_updater(comm, Plain, (inputs, labels), micro_batches=4)
    seen = []
    for array in (inputs, inputs if comm.rank == 0 else 0 * inputs):
        reporter, found = chainer.Reporter(), {}
        reporter.add_observer('main', updater.get_optimizer('main').target)
        with reporter.scope(found):
            updater.evaluate(array, labels)
        seen.append(found)
    assert seen[0] == seen[1]


@on_ranks(1, 2, 4)
def test_an_evaluation_does_not_change_the_model(comm):
    data = dataset(12)
    updater = make_updater(comm, Normalised, data, micro_batches=2)
    updater.evaluate(*data)
    model = updater.get_optimizer('main').target
    before = bits(model)
    updater.evaluate(*data)
    assert bits(model) == before


@on_ranks(2)
def test_ranks_that_want_different_steps_get_an_error(comm):
    inputs, labels = dataset(8)
    updater = make_updater(comm, Plain, (inputs, labels), micro_batches=2)
    step = updater.evaluate if comm.rank else updater.predict
    arguments = (inputs, labels) if comm.rank else (inputs,)
    with pytest.raises(ValueError, match='rank 1: this rank is about to '
                                         'evaluate, but the first stage to '
                                         'predict'):
        step(*arguments)


class InPlace(Divisible):
    """Layers that would change an array that is not a variable."""

    def __init__(self):
        super().__init__()
        np.random.seed(0)
        self.append(_doubled)
        self.append(L.Linear(8, 8))
        self.append(lambda h: h / np.sqrt(8))
        self.append(L.Linear(8, 5))


def _doubled(h):
    h += h
    return h


@on_ranks(1, 2)
def test_layers_get_variables_in_evaluation_as_in_training(comm):
    inputs, labels = dataset(6)
    updater = make_updater(comm, InPlace, (inputs, labels), micro_batches=2)
    before = inputs.copy()
    first = updater.predict(inputs)
    assert first.dtype == np.float32
    assert np.array_equal(updater.predict(inputs), first)
    assert np.array_equal(inputs, before)
