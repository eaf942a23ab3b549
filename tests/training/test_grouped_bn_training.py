"""Grouped batch normalisation in pipelines, and beside other exchanges."""

from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    ReplicaIterator,
    create_communicator,
)
from chainer_fp8pipe.intercept.function_calls import intercepting
from chainer_fp8pipe.links.grouped_bn import GroupedBatchNormalization
from chainer_fp8pipe.pipeline.means import BatchStatistics
from chainer_fp8pipe.training.grouped_bn_model import create_grouped_bn_model

import chainer
import chainer.links as L
import chainermn
import numpy as np
import pytest

from ..links.groups import assert_close
from ..ranks import on_ranks
from .updaters.networks import (
    Normalised,
    dataset,
    gathered,
    gradients,
    serial_gradients,
)


def pipeline(grid, data, model, before_stage, **settings):
    if before_stage:
        model = create_grouped_bn_model(model, grid.data)
    model = model.stage(grid, balance='layers')
    if not before_stage:
        model = create_grouped_bn_model(model, grid.data)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.0),
        create_communicator('float32', mpi_comm=grid.data))
    optimizer.setup(model)
    iterator = ReplicaIterator(
        chainer.datasets.TupleDataset(*data), len(data[0]),
        grid, shuffle=False)
    updater = PipelineUpdater(iterator, optimizer, grid, micro_batches=2,
                              **settings)
    updater.update()        # the first one broadcasts
    return model


def averages(model):
    return {f'{path}/{name}': getattr(link, name)
            for path, link in model.namedlinks()
            if isinstance(link, L.BatchNormalization)
            for name in ('avg_mean', 'avg_var')}


def serial_averages(batch):
    """After one batch, of which all has the same statistics."""
    model, statistics = Normalised(), BatchStatistics()
    assert [parameter.array for parameter in model.params()]    # drawn now
    with chainer.using_config('train', True):
        for part in batch:
            with statistics.counting(), intercepting(statistics):
                model(part)
    statistics.finish()
    return averages(model)


@on_ranks(2, 4)
@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('before_stage', [False, True])
def test_micro_batches_of_replicas_are_normalised_together(
        comm, recompute, before_stage):
    """In a step of 14 samples, replica 0 has the first 7."""
    data = dataset(14)
    grid = ProcessGrid(comm, pipeline=comm.size // 2)
    model = pipeline(grid, data, Normalised(), before_stage,
                     recompute=recompute)
    assert sum(type(link) is GroupedBatchNormalization
               for link in model.links()) == sum(
        isinstance(link, L.BatchNormalization) for link in model.links())
    # Micro-batches of 4 and 3 samples on each replica.
    micro_batches = [[*range(4), *range(7, 11)], [4, 5, 6, 11, 12, 13]]
    order = np.concatenate(micro_batches)
    _, expected = serial_gradients(
        Normalised, (data[0][order], data[1][order]), [8, 6])
    found = gathered(comm, gradients(model))
    for name in expected:
        assert_close(found[name], expected[name], 3e-6)
    wanted = serial_averages([data[0][part] for part in micro_batches])
    found = gathered(comm, averages(model))
    for name in wanted:
        assert_close(found[name], wanted[name])
    grid.free()
