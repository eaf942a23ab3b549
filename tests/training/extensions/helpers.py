"""A small training run that several tests interrupt and watch."""
import os

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.snapshots.snapshot import find_snapshots

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater


class Net(chainer.Chain):
    """Dropout makes it depend on random numbers, as real ones do."""

    def __init__(self, width=8):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(6, width)
            self.bn = L.BatchNormalization(width)
            self.l2 = L.Linear(width, 3)

    def forward(self, x):
        return self.l2(F.dropout(F.relu(self.bn(self.l1(x))), 0.3))


def make_trainer(comm, out, epochs=4, name='fp8', width=8,
                 optimizer=None, dtype='f4', **options):
    """A trainer and its communicator; the same on every call."""
    if name.startswith('fp8'):
        options = {'warmup': 3, 'period': 4, **options}
    communicator = create_communicator(name, comm, **options)
    numpy.random.seed(0)
    model = L.Classifier(Net(width))
    numpy.random.seed(1 + comm.rank)
    x = numpy.random.rand(40, 6).astype(dtype)
    t = numpy.random.randint(0, 3, 40).astype('i4')
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, t), 8)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizer or chainer.optimizers.Adam(0.01), communicator).setup(model)
    trainer = Trainer(StandardUpdater(iterator, optimizer),
                      (epochs, 'epoch'), str(out))
    trainer.extend(decay, trigger=(2, 'iteration'))
    return trainer, communicator


def decay(trainer):
    """A learning rate that depends on the iteration and nothing else.

    It is one of NumPy's numbers, which round differently from Python's.
    """
    hyperparam = trainer.updater.get_optimizer('main').hyperparam
    name = 'alpha' if hasattr(hyperparam, 'alpha') else 'lr'
    setattr(hyperparam, name, numpy.float64(
        0.02 / (1 + trainer.updater.iteration)))


def names(folder):
    """The snapshots in a folder, oldest first."""
    return [os.path.basename(path) for path in find_snapshots(str(folder))]


def arrays(model):
    """Every array of a model that is saved."""
    saved = chainer.serializers.DictionarySerializer()
    saved.save(model)
    return {key: numpy.array(value) for key, value in saved.target.items()}


def bits(model):
    return {key: array.tobytes() for key, array in arrays(model).items()}


def weights(trainer):
    """All bits of the model, statistics of batch normalisation included."""
    return bits(trainer.updater.get_optimizer('main').target)


def updates_of(communicator, model):
    """How many updates of a model a communicator knows of."""
    state = communicator.state(model)
    return int(state['codec|done']) if state else 0
