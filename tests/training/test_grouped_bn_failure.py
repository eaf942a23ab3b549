"""A replica that fails while others wait to normalise with it."""
from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    ReplicaIterator,
    create_communicator,
)
from chainer_fp8pipe.training.grouped_bn_model import create_grouped_bn_model

import chainer
import chainermn
import pytest

from ..ranks import on_ranks
from .updaters.networks import Normalised, dataset


class NoPaper:
    """A layer that fails on the second replica."""

    def __init__(self, grid):
        self.fails = grid.replica_index == 1

    def __call__(self, x):
        if self.fails:
            raise OSError('no more paper')
        return x


@on_ranks(2, 4)
@pytest.mark.parametrize('layer', [0, 3, 6])
def test_a_failing_layer_is_an_error_on_every_rank(comm, layer):
    """Before, between and behind the batch normalisations."""
    grid = ProcessGrid(comm, pipeline=comm.size // 2)
    for _ in range(2):          # also with what is made anew on these ranks
        model = Normalised()
        model.insert(layer, NoPaper(grid))
        model = create_grouped_bn_model(
            model.stage(grid, balance='layers'), grid.data)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(0.0),
            create_communicator('float32', mpi_comm=grid.data))
        optimizer.setup(model)
        iterator = ReplicaIterator(
            chainer.datasets.TupleDataset(*dataset(12)), 12,
            grid.replica_index, grid.replicas, shuffle=False)
        updater = PipelineUpdater(iterator, optimizer, grid, micro_batches=2)
        with pytest.raises(Exception, match='no more paper'):
            updater.update()
