"""An Evaluator over stages and replicas gives what it gives serially."""
from chainer_fp8pipe.training.iterators import ReplicaIterator

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.trainers import Job
from tests.training.updaters.networks import NETWORKS, Normalised, dataset
from tests.training.updaters.test_pipeline_updater import serial


def serially(model, data, batch):
    """What Chainer's Evaluator gives for the whole model."""
    return extensions.Evaluator(serial(data, batch, repeat=False),
                                L.Classifier(model))()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(('network', 'stages', 'shared'), [
    ('Plain', None, False), ('Noisy', None, False), ('Plain', 2, False),
    ('Plain', 2, True)])
def test_the_evaluator_gives_what_it_gives_serially(
        comm, network, stages, shared):
    """Where each pipeline evaluates all data, and where each its share."""
    data = dataset(20)      # the last batch is short
    job = Job(comm, network, stages if comm.size > 1 else 1, data=data,
              micro_batches=4,
              optimizer=chainer.optimizers.SGD(0.0))
    evaluator = extensions.Evaluator(ReplicaIterator(
        chainer.datasets.TupleDataset(*data), 8,
        grid=job.grid if shared else None, repeat=False, shuffle=False),
        job.model, eval_func=job.updater.evaluate)
    if shared and job.communicator is not None:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, job.communicator)
    found = evaluator()
    assert found == pytest.approx(
        serially(NETWORKS[network](), data, 8), rel=1e-5)
    job.update()
    assert evaluator() == found
    assert comm.allgather(found) == [found] * comm.size


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
    data, whole = dataset(14), Normalised()
    train_serially(whole, data, [5, 5, 4],
                   chainer.optimizers.MomentumSGD(0.1), 3)
    job = Job(comm, 'Normalised', data=data, recompute=recompute).updated(3)
    found = extensions.Evaluator(serial(data, 6, repeat=False), job.model,
                                 eval_func=job.updater.evaluate)()
    assert found == pytest.approx(serially(whole, data, 6), rel=1e-4)
    assert found != pytest.approx(serially(Normalised(), data, 6), rel=1e-2)


@on_ranks(2)
def test_ranks_that_want_different_steps_get_an_error(comm):
    job = Job(comm)
    step = job.updater.evaluate if comm.rank else job.updater.predict
    with pytest.raises(ValueError, match='rank 1: this rank is about to '
                                         'evaluate, but the first stage to '
                                         'predict'):
        step(*job.data[:1 + comm.rank])
