"""Pipelines go on at another depth or width, or serially, as they would."""
import json
import warnings

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.links import Divisible, Dropout, lazy
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.iterators import ReplicaIterator
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training import Trainer, extensions
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from tests.ranks import on_ranks

from .helpers import arrays
from .stages import first, same_bits, weights

STOP, LAST = 5, 10


def network(normalised=False, random=True):
    """What is random in it only a pipeline draws the same however cut."""
    model = Divisible(lazy(L.Linear, 6, 9), F.relu,
                      lazy(L.Linear, 9, 8), F.tanh)
    if normalised:
        model.append(lazy(L.BatchNormalization, 8))
    if random:
        model.append(Dropout(0.2))
    # None: its shape comes from the first batch.
    model.append(lazy(L.Linear, None if random else 8, 8))
    model.append(F.tanh)
    model.append(lazy(L.Linear, 8, 3))
    return model


def dataset():
    draw = numpy.random.RandomState(0)
    return chainer.datasets.TupleDataset(
        draw.rand(34, 6).astype('f'), draw.randint(0, 3, 34).astype('i'))


def optimizer_for(grid, communicator):
    optimizer = chainer.optimizers.Adam(0.01)
    if grid.replicas == 1:
        return optimizer
    options = {'warmup': 2, 'period': 3} if communicator == 'fp8' else {}
    return chainermn.create_multi_node_optimizer(
        optimizer, create_communicator(communicator, grid.data, **options))


def make_trainer(comm, out, stages, iterations, model,
                 communicator='float32', cut=None, **options):
    """A pipeline's trainer, and its grid."""
    grid = ProcessGrid(comm, stages)
    optimizer = optimizer_for(grid, communicator).setup(
        model.stage(grid, **{'balance': 'layers', **(cut or {})}))
    # Four micro-batches of all replicas together.
    updater = PipelineUpdater(
        ReplicaIterator(dataset(), 12, grid=grid, seed=1), optimizer, grid,
        micro_batches=4 // grid.replicas, **options)
    return Trainer(updater, (iterations, 'iteration'), str(out)), grid


def train(comm, out, stages, iterations, resumed=None, model=None,
          **options):
    """Trains, from a snapshot if told, and writes snapshots on the way.

    Args:
        comm: The ranks; None: this rank takes no part.
        resumed: None for a new run; otherwise whether it must be exact.

    Returns:
        This rank's weights, and the loss of every iteration; None and None
        on a rank that takes no part.
    """
    if comm is None:
        return None, None
    trainer, grid = make_trainer(comm, out, stages, iterations,
                                 model or network(), **options)
    result = finish(trainer, grid, out, resumed)
    grid.free()
    return result


def train_serially(out, iterations, resumed=None):
    """The same with nothing but Chainer; on every rank for itself."""
    model = network(random=False)

    def loss(x, t):
        value = F.softmax_cross_entropy(model(x), t)
        chainer.report({'loss': float(value.array)}, model)
        return value
    updater = StandardUpdater(
        ReplicaIterator(dataset(), 12, seed=1),
        chainer.optimizers.Adam(0.01).setup(model), loss_func=loss)
    return finish(Trainer(updater, (iterations, 'iteration'), str(out)),
                  MPI.COMM_SELF, out, resumed)


def finish(trainer, ranks, out, resumed):
    losses = []
    trainer.extend(lambda trainer: losses.append(
        float(trainer.observation['main/loss'])),
        name='losses', trigger=(1, 'iteration'))
    trainer.extend(Snapshot(ranks), trigger=(STOP, 'iteration'))
    if getattr(ranks, 'comm', ranks).rank == 0:
        trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    if resumed is not None:
        with warnings.catch_warnings():
            warnings.simplefilter('error' if resumed else 'ignore')
            assert resume(trainer, ranks, str(out)) == STOP
    trainer.run()
    return weights(trainer), losses


def close(found, expected):
    for key, value in found.items():
        numpy.testing.assert_allclose(value, expected[key], 2e-5, 1e-6)


@pytest.mark.parametrize(('before', 'after'), [
    (1, 4), (2, 1), (4, 2), (4, 4)])
@on_ranks(4)
def test_a_run_at_any_depth_gives_the_same_bits(comm, before, after,
                                                tmp_path):
    """With dropout and batch normalisation; against one stage."""
    model = network(normalised=True)
    expected, losses = train(MPI.COMM_SELF, tmp_path / f'whole{comm.rank}',
                             1, LAST, model=model)
    model = network(normalised=True)
    train(first(comm, before), tmp_path, before, STOP, model=model)
    comm.Barrier()
    model = network(normalised=True)
    found, second = train(first(comm, after), tmp_path, after, LAST,
                          resumed=before == after, model=model)
    if found:
        assert second == losses[STOP:]
        same_bits(found, expected)
    if comm.rank == 0:
        log = json.loads((tmp_path / 'log').read_text())
        assert [entry['iteration'] for entry in log] == [2, 4, 6, 8, 10]
        numpy.testing.assert_allclose(
            [entry['main/loss'] for entry in log],
            numpy.reshape(losses, (5, 2)).mean(1))


@pytest.mark.parametrize(('before', 'after'), [
    ((4, 2), (2, 2)), ((2, 2), (4, 2)), ((2, 1), (4, 2)), ((4, 1), (4, 4)),
    ((1, 1), (4, 2)), ((4, 2), (1, 1))])
@on_ranks(4)
def test_a_run_at_any_width_gives_the_same_losses(comm, before, after,
                                                  tmp_path):
    """(ranks, stages); dropout masks go with the samples."""
    expected, losses = train(MPI.COMM_SELF, tmp_path / f'whole{comm.rank}',
                             1, LAST)
    train(first(comm, before[0]), tmp_path, before[1], STOP)
    comm.Barrier()
    found, second = train(first(comm, after[0]), tmp_path, after[1], LAST,
                          resumed=False)
    if found:
        numpy.testing.assert_allclose(second, losses[STOP:], 1e-5)
        close(found, expected)


@pytest.mark.parametrize('stages', [1, 4])
@on_ranks(4)
def test_a_serial_run_goes_on_in_a_pipeline_and_back(comm, stages, tmp_path):
    expected, losses = train_serially(tmp_path / f'whole{comm.rank}', LAST)
    for folder in 'serial', 'pipeline':
        out = tmp_path / folder
        if folder == 'pipeline':
            train(first(comm, stages), out, stages, STOP,
                  model=network(random=False))
        elif comm.rank == 0:
            train_serially(out, STOP)
        comm.Barrier()
        found = second = None
        if folder == 'serial':
            found, second = train(first(comm, stages), out, stages, LAST,
                                  resumed=False, model=network(random=False))
        elif comm.rank == 0:
            found, second = train_serially(out, LAST, resumed=False)
        if found:
            numpy.testing.assert_allclose(second, losses[STOP:], 1e-5)
            close(found, expected)


@pytest.mark.parametrize('communicator', ['fp8', 'float32'])
@on_ranks(4)
def test_a_hybrid_run_goes_on_exactly(comm, communicator, tmp_path):
    """2 stages x 2 replicas, the residuals of each rank included."""
    expected, all_losses = train(
        comm, tmp_path / 'whole', 2, LAST, communicator=communicator,
        model=network(normalised=True))
    train(comm, tmp_path / 'part', 2, STOP, communicator=communicator,
          model=network(normalised=True))
    found, losses = train(comm, tmp_path / 'part', 2, LAST, resumed=True,
                          communicator=communicator,
                          model=network(normalised=True))
    assert losses == all_losses[STOP:]
    same_bits(found, expected)


@on_ranks(4)
def test_layers_move_between_any_cuts(comm, tmp_path):
    """From two chunks on each of 2 ranks to an uneven cut in 4."""
    expected, losses = train(MPI.COMM_SELF, tmp_path / f'whole{comm.rank}',
                             1, LAST)
    train(first(comm, 2), tmp_path, 2, STOP, cut={'chunks': 2},
          schedule='interleaved')
    comm.Barrier()
    found, second = train(comm, tmp_path, 4, LAST, resumed=False,
                          cut={'balance': [1, 3, 2, 2]})
    assert second == losses[STOP:]
    same_bits(found, expected)


@on_ranks(4)
def test_chainers_load_npz_reads_what_a_pipeline_wrote(comm, tmp_path):
    found, _ = train(comm, tmp_path, 4, STOP)
    model = network()
    chainer.serializers.load_npz(
        tmp_path / 'snapshot_iter_5.npz', model,
        'all/trainer/updater/model:main/')
    same_bits(found, arrays(model))
    assert len(arrays(model)) == sum(comm.allgather(len(found)))
