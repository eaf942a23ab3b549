"""A job whose layers can be dealt out to ranks in any way.

Every layer has a loss of its own, so that it learns the same whatever the
other ranks have: what a snapshot brings back can be compared with a serial
run bit for bit.
"""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.training.iterators import ReplicaIterator

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater

from .helpers import arrays

LAYERS = 5


class Stage(chainer.Chain):
    """Some layers of the model, each under its number in the whole.

    Layer 1 gets its shape from its first batch, layer 3 normalises.
    """

    def __init__(self, numbers, width=4):
        super().__init__()
        for number in numbers:
            initial = chainer.initializers.LeCunNormal(
                rng=numpy.random.RandomState(number))
            self.add_link(str(number), L.BatchNormalization(3)
                          if number == 3 else L.Linear(
                              None if number == 1 else 3, width,
                              initialW=initial))

    def losses(self, x):
        return [F.average((layer(x) - 1) ** 2) for layer in self.children()]


class Updater(StandardUpdater):
    """One update of every layer, each for itself."""

    def update_core(self):
        optimizer = self.get_optimizer('main')
        samples = numpy.array(self.get_iterator('main').next(),
                              chainer.get_dtype())
        losses = optimizer.target.losses(
            chainer.as_variable(samples + samples.dtype.type(
                numpy.random.rand() * self.noise)))
        optimizer.target.cleargrads()
        for loss in losses:
            loss.backward(loss_scale=optimizer._loss_scale)
        if hasattr(optimizer, 'is_changed'):
            # Or ChainerMN would spend the first update on a broadcast.
            optimizer.is_changed(optimizer.target)
        optimizer.update()

    noise = 0


class Noisy(Updater):
    """Draws random numbers, so that another state of theirs shows."""

    noise = 0.1


def share(stages, stage, layers=LAYERS):
    """The layers of one stage of an even cut."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def data(samples=22):
    return numpy.random.RandomState(7).rand(samples, 3).astype('f')


def make_job(comm, out, stages, name='float32', updater=Updater,
             optimizer=None, layers=LAYERS, iterator=None, **options):
    """A trainer of some iterations, and the grid that it works on.

    Args:
        comm: All ranks.
        stages: How many of them share a replica's layers.
        name: Of the data axis's communicator, where there are replicas.
        options: For the stage's layers.
    """
    grid = ProcessGrid(comm, stages)
    model = Stage(share(stages, grid.stage_index, layers), **options)
    optimizer = optimizer or chainer.optimizers.Adam(0.01)
    if grid.replicas > 1:
        import chainermn
        warmup = {'warmup': 2, 'period': 3} if name == 'fp8' else {}
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, create_communicator(name, grid.data, **warmup))
    optimizer.setup(model)
    numpy.random.seed(100 + comm.rank)
    iterator = iterator or ReplicaIterator(data(), 8, grid=grid, seed=3)
    return Trainer(updater(iterator, optimizer), (1, 'iteration'),
                   str(out)), grid


def run(trainer, iterations):
    """Trains until so many iterations are done in all."""
    trainer.stop_trigger = chainer.training.get_trigger(
        (iterations, 'iteration'))
    trainer.run()
    return weights(trainer)


def weights(trainer):
    """This rank's values by their names in the whole model."""
    return arrays(trainer.updater.get_optimizer('main').target)


def same_bits(found, expected):
    assert expected
    for key, value in found.items():
        assert numpy.array_equal(value, expected[key]), key


def first(comm, ranks):
    """A communicator of the first ranks; None on the others."""
    part = comm.Split(int(comm.rank < ranks), comm.rank)
    return part if comm.rank < ranks else None
