"""2 stages x 2 replicas, with all that a user adds, against serial Chainer."""
from chainer_fp8pipe.training.iterators import ReplicaIterator

import chainer
import chainer.functions as F
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, close, dataset, gathered
from tests.training.updaters.test_evaluation import serially
from tests.training.updaters.test_hybrid import make
from tests.training.updaters.test_pipeline_updater import update
from tests.training.updaters.test_whole_model import (
    PREPARATIONS,
    Overflowing,
    parameters,
    train_serially,
)


@on_ranks(4)
@pytest.mark.parametrize('name', PREPARATIONS)
def test_an_optimizer_acts_as_on_the_whole_model_and_batch(comm, name):
    prepare, data = PREPARATIONS[name], dataset(12)
    expected = train_serially(Plain, data,
                              chainer.optimizers.MomentumSGD(0.5), 4, prepare)
    grid, updater = make(comm, 2, Plain, data, 12, rate=0.5,
                         micro_batches=3)
    optimizer = updater.get_optimizer('main')
    prepare(optimizer)
    for _ in range(4):
        update(updater)
    close(gathered(comm, parameters(optimizer.target)), expected, 1e-5)
    grid.free()


@on_ranks(4)
@pytest.mark.parametrize('sample', [0, 11])     # of either replica
def test_an_overflow_in_one_replica_makes_all_ranks_skip_the_update(
        comm, sample):
    inputs, labels = dataset(12)

    def train(optimizer, step):
        """Three updates, of which the second overflows; the loss scales."""
        optimizer.loss_scaling()
        optimizer._loss_scale = 2.0 ** 14
        scales = []
        for value in (0.5, 1e37, 0.5):
            inputs[sample] = value
            with np.errstate(all='ignore'):
                step()
            scales.append(optimizer._loss_scale)
        return scales

    model = Overflowing()
    optimizer = chainer.optimizers.MomentumSGD(0.5).setup(model)
    expected = train(optimizer, lambda: optimizer.update(
        lambda: F.softmax_cross_entropy(model(inputs), labels)))
    assert expected[1] == expected[0] / 2
    grid, updater = make(comm, 2, Overflowing, (inputs, labels), 12, rate=0.5,
                         micro_batches=3)
    part = updater.get_optimizer('main')
    assert train(part, updater.update) == expected
    close(gathered(comm, parameters(part.target)), parameters(model), 1e-5)
    grid.free()


@on_ranks(4)
@pytest.mark.parametrize('shared', [False, True])
def test_an_evaluator_gives_what_it_gives_serially_on_every_rank(
        comm, shared):
    """Where each pipeline evaluates all data, and where each its share."""
    data = dataset(20)      # the last batch is short
    grid, updater = make(comm, 2, Plain, data, 20,
                         micro_batches=4)
    optimizer = updater.get_optimizer('main')
    iterator = ReplicaIterator(
        chainer.datasets.TupleDataset(*data), 8,
        grid.replica_index if shared else 0, grid.replicas if shared else 1,
        repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(iterator, optimizer.target,
                                     eval_func=updater.evaluate)
    if shared:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, optimizer.communicator)
    update(updater)         # learning rate 0
    found = evaluator()
    assert found == pytest.approx(serially(Plain, *data, 8),
                                  rel=1e-5)
    assert comm.allgather(found) == [found] * comm.size
    assert evaluator() == found
    grid.free()
