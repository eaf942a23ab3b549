"""Stages times replicas, against serial Chainer on the whole batch."""
import chainer_fp8pipe
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.training.iterators import ReplicaIterator
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainermn
import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.networks import (
    NETWORKS,
    Plain,
    close,
    dataset,
    gathered,
    gradients,
    serial_gradients,
)
from tests.training.updaters.test_pipeline_updater import update


class Odd(Plain):
    """Its layer 5 fails."""

    def __init__(self):
        super().__init__()
        self[5] = lambda x: None


def make(comm, pipeline, network, data, batch, communicator='float32',
         rate=0.0, options=None, **settings):
    grid = ProcessGrid(comm, pipeline=pipeline)
    model = network().stage(grid, balance='layers')
    optimizer = chainer.optimizers.MomentumSGD(rate)
    if grid.replicas > 1:
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, chainer_fp8pipe.create_communicator(
                communicator, mpi_comm=grid.data, **(options or {})))
    optimizer.setup(model)
    iterator = ReplicaIterator(
        chainer.datasets.TupleDataset(*data), batch, grid.replica_index,
        grid.replicas, shuffle=False)
    return grid, PipelineUpdater(iterator, optimizer, grid, **settings)


@on_ranks(2, 4, 6)
@pytest.mark.parametrize('pipeline', [1, 2, 3])
@pytest.mark.parametrize('ignored', [(), (0, 1, 2, 9)])
def test_loss_and_gradients_are_those_of_the_whole_batch(
        comm, pipeline, ignored):
    if comm.size % pipeline:
        pipeline = comm.size
    data = dataset(13, ignored=ignored)
    grid, updater = make(comm, pipeline, Plain, data, 13, micro_batches=2)
    seen = update(updater)
    # Without dropout or normalisation the cut does not matter.
    loss, expected = serial_gradients(Plain, data, [13])
    assert seen['main/loss'] == pytest.approx(loss, rel=1e-5)
    assert comm.allgather(seen) == [seen] * comm.size
    found = gathered(comm, gradients(updater.get_optimizer('main').target))
    close(found, expected, 2e-6)
    grid.free()


@on_ranks(4)
def test_dropout_masks_depend_on_the_sample_and_not_on_the_replica(comm):
    data = dataset(12)
    grid, updater = make(comm, 2, NETWORKS['Noisy'], data, 12,
                         micro_batches=3)
    seen = update(updater)
    loss, expected = serial_gradients(NETWORKS['Noisy'], data, [2] * 6)
    assert seen['main/loss'] == pytest.approx(loss, rel=1e-5)
    found = gathered(comm, gradients(updater.get_optimizer('main').target))
    close(found, expected, 2e-6)
    grid.free()


@on_ranks(4, 6)
@pytest.mark.parametrize('communicator', ['fp8', 'fp8_paper', 'float16',
                                          'float32', 'naive'])
def test_replicas_keep_the_same_bits(comm, communicator):
    options = {'warmup': 1} if communicator.startswith('fp8') else {}
    grid, updater = make(
        comm, 2, NETWORKS['Normalised'], dataset(24), 12, communicator, 0.1,
        options, micro_batches=2)
    model = updater.get_optimizer('main').target
    losses = [update(updater)['main/loss'] for _ in range(5)]
    bits = {name: parameter.array.tobytes()
            for name, parameter in model.namedparams()}
    everyone = grid.data.allgather(bits)
    assert all(other == bits for other in everyone)
    assert np.isfinite(losses).all()
    assert len(set(losses)) == 5
    grid.free()


def make_plain(comm):
    """A grid of 2 stages, an updater that learns, and its stage."""
    grid, updater = make(comm, 2, Plain, dataset(12), 12, rate=0.1,
                         micro_batches=2)
    return grid, updater, updater.get_optimizer('main').target


@on_ranks(4)
def test_no_update_is_lost_to_the_first_broadcast(comm):
    grid, updater, model = make_plain(comm)
    before = {name: parameter.array.copy()
              for name, parameter in model.namedparams()}
    update(updater)
    assert all((parameter.array != before[name]).any()
               for name, parameter in model.namedparams())
    grid.free()


@on_ranks(4)
def test_replicas_that_start_apart_are_brought_together(comm):
    grid, updater, model = make_plain(comm)
    for parameter in model.params():
        parameter.array += grid.replica_index
    update(updater)
    sums = [float(parameter.array.sum()) for parameter in model.params()]
    assert grid.data.allgather(sums) == [sums] * grid.replicas
    grid.free()


@on_ranks(4)
def test_replicas_without_a_communicator_are_an_error(comm):
    grid = ProcessGrid(comm, pipeline=2)
    model = Plain().stage(grid)
    iterator = chainer.iterators.SerialIterator([0], 1)
    with pytest.raises(ValueError, match='2 replicas would go apart; wrap'):
        PipelineUpdater(iterator, chainer.optimizers.SGD().setup(model), grid)
    grid.free()


@on_ranks(4)
def test_a_communicator_of_other_ranks_is_an_error(comm):
    grid = ProcessGrid(comm, pipeline=2)
    model = Plain().stage(grid)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), chainer_fp8pipe.create_communicator(
            'float32', mpi_comm=comm)).setup(model)
    with pytest.raises(ValueError, match='has 4 ranks but a stage has 2 '
                                         'replicas'):
        PipelineUpdater(chainer.iterators.SerialIterator([0], 1), optimizer,
                        grid)
    grid.free()


@on_ranks(4)
def test_an_error_in_one_replica_reaches_all_ranks(comm):
    # Rank 3 is the last stage of the second replica.
    grid, updater = make(comm, 2, Odd if comm.rank == 3 else Plain,
                         dataset(12), 12, micro_batches=2)
    with pytest.raises((ValueError, RuntimeError), match='layer 5'):
        updater.update()
    grid.free()


@on_ranks(4)
def test_a_replica_whose_data_end_first_is_an_error(comm):
    grid, _ = make(comm, 2, Plain, dataset(12), 12, micro_batches=2)
    model = Plain().stage(grid)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), chainer_fp8pipe.create_communicator(
            'float32', mpi_comm=grid.data)).setup(model)
    samples = 6 if grid.replica_index else 12
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*dataset(samples)), 6, repeat=False)
    updater = PipelineUpdater(iterator, optimizer, grid, micro_batches=2)
    updater.update()
    with pytest.raises(ValueError, match='the step is (train|stop) on rank '
                                         '.*equal length'):
        updater.update()
    grid.free()


@on_ranks(4)
def test_a_gradient_that_is_not_finite_ends_all_ranks_of_its_stage(comm):
    inputs, labels = dataset(12)
    inputs[0] = np.nan
    grid, updater = make(comm, 2, Plain, (inputs, labels), 12, 'fp8',
                         micro_batches=2, options={'warmup': 0})
    with pytest.raises(RuntimeError, match='not finite'):
        update(updater)
    grid.free()


@on_ranks(4)
def test_what_a_failed_step_leaves_does_not_reach_a_new_grid(comm):
    for _ in range(3):
        for network, fails in ((Odd, True), (Plain, False)):
            grid, updater = make(comm, 2, network, dataset(12), 12,
                                 micro_batches=4)
            if fails:
                with pytest.raises((ValueError, RuntimeError),
                                   match='layer 5'):
                    updater.update()
            else:
                updater.update()
            grid.free()
