"""The one factory of trainings: a network, its way over the ranks, updates.

    job = Job(comm, 'Normalised', stages=2, communicator='fp8')
    losses = job.update(3)
    close(job.values(), Job(comm, 'Normalised', SERIAL).updated(3).values())

Every job of a network starts with the same values and reads the same
batches, whatever its way: what one learns can be compared with what another
one does.
"""
import os

from chainer_fp8pipe import Divisible, create_communicator, partition
from chainer_fp8pipe.chains.saving import saving_parts
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.mpi.ranks import once
from chainer_fp8pipe.training.extensions import Snapshot, find_snapshots
from chainer_fp8pipe.training.iterators import ReplicaIterator
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from tests.models.judge import counted_times

from .updaters.networks import NETWORKS, dataset, gathered, gradients

#: Ways that have no stages: Chainer's own, on every rank for itself, and
#: ChainerMN's, with the whole model and a share of each batch on every rank.
SERIAL, REPLICAS = 'serial', 'replicas'
#: Options of communicators whose codec starts within a few updates.
CODECS = {'fp8': {'warmup': 2, 'period': 3}, 'fp8_paper': {'warmup': 2},
          'int4': {'warmup': 2}}


class Job:
    """A training of a network, which has done nothing yet.

    Args:
        comm: All ranks.
        network: A name of ``NETWORKS``, or what makes a ``Divisible``, or
            else a Chain that returns its loss and reports it.
        stages: Of one replica; the other ranks are more replicas.  None: all
            ranks; or a ``ProcessGrid``, :data:`SERIAL` or :data:`REPLICAS`.
        data: Inputs and labels; default: 36 samples.
        batch: Samples of all replicas together; default: 12, or all of the
            data that are given.
        optimizer: Not set up; default: momentum SGD.
        communicator: Of replicas: a name, or a communicator.
        codec: Options of the communicator; default: those of ``CODECS``.
        cut: Options of ``stage``, or of ``partition``.
        iterator: In place of one that gives the samples in their order.
        settings: Of ``PipelineUpdater``; default: 3 micro-batches.

    Attributes:
        ranks: What ``Snapshot`` and ``resume`` are given.
    """

    def __init__(self, comm, network='Plain', stages=None, *, data=None,
                 batch=None, optimizer=None, communicator='float32',
                 codec=None, cut=None, iterator=None, shuffle=False,
                 **settings):
        self.comm = MPI.COMM_SELF if stages == SERIAL else comm
        batch = batch or (12 if data is None else len(data[0]))
        self.data = dataset(36) if data is None else data
        self.network = NETWORKS.get(network, network)
        model = self.network()
        optimizer = optimizer or chainer.optimizers.MomentumSGD(0.1)
        whole = stages in (SERIAL, REPLICAS)
        number = 1 if whole else stages or comm.size
        self.grid = grid = (
            stages if isinstance(stages, ProcessGrid) else once(
                self.comm, f'{number} stages',
                lambda: ProcessGrid(self.comm, number)))
        self.communicator, self.ranks = None, grid
        if grid.replicas > 1:
            if isinstance(communicator, str):
                communicator = create_communicator(
                    communicator, grid.data, **(
                        CODECS.get(communicator, {}) if codec is None
                        else codec))
            self.communicator = communicator
            optimizer = chainermn.create_multi_node_optimizer(
                optimizer, communicator)
        if iterator is None:
            iterator = ReplicaIterator(
                chainer.datasets.TupleDataset(*self.data), batch, grid=grid,
                shuffle=shuffle, seed=1)
        layers = isinstance(model, Divisible)
        if whole:
            self.model = model.divide(0, len(model)) if layers else model
            self.updater = StandardUpdater(
                iterator, optimizer.setup(self.model),
                loss_func=self._loss if layers else None)
            if grid.replicas > 1:
                self.ranks = communicator
                # Or ChainerMN would spend the first update on a broadcast.
                optimizer.is_changed(self.model)
        else:
            settings = {'micro_batches': 3, **settings}
            if layers:
                self.model = model.stage(grid, **{'balance': 'layers',
                                                  **(cut or {})})
            else:
                samples = batch // grid.replicas // settings['micro_batches']
                with counted_times():
                    self.model = partition(
                        model, tuple(array[:samples] for array in self.data),
                        grid, micro_batches=settings['micro_batches'],
                        **(cut or {}))
            self.updater = PipelineUpdater(
                iterator, optimizer.setup(self.model), grid, **settings)
        self.optimizer = optimizer

    def _loss(self, x, t):
        loss = F.softmax_cross_entropy(self.model(x), t)
        chainer.report({'loss': loss.array}, self.model)
        return loss

    def update(self, times=1):
        """What is reported in each update, as numbers."""
        return reports(self.updater, times)

    def updated(self, times):
        """The job, after so many updates."""
        self.update(times)
        return self

    def trainer(self, out, iterations):
        """A Trainer of the job."""
        return Trainer(self.updater, (iterations, 'iteration'), str(out))

    def values(self):
        """All arrays of the whole model, by key; on all ranks."""
        return gathered(self.comm, arrays(self.model))

    def gradients(self):
        """The gradients of the whole model, by key; on all ranks."""
        return gathered(self.comm, gradients(self.model))


def reports(updater, times):
    """What is reported in each update, as numbers."""
    reporter, found = chainer.Reporter(), []
    reporter.add_observer('main', updater.get_optimizer('main').target)
    for _ in range(times):
        seen = {}
        with reporter.scope(seen), chainer.using_config('train', True):
            updater.update()
        found.append({key: float(getattr(value, 'array', value))
                      for key, value in seen.items()})
    return found


def arrays(model):
    """Copies of all arrays of a model that are saved, by key."""
    saved = chainer.serializers.DictionarySerializer()
    with saving_parts():        # of each stage
        saved.save(model)
    return {key: numpy.array(value) for key, value in saved.target.items()}


def bits(model):
    """As :func:`arrays`, but bytes, to be compared."""
    return {key: array.tobytes() for key, array in arrays(model).items()}


def same_bits(found, expected):
    """Each array to the bit; what is missing in ``found`` is elsewhere."""
    assert found
    for name, value in found.items():
        assert numpy.array_equal(value, expected[name]), name


def first(comm, ranks):
    """A communicator of the first ranks; None on the others."""
    part = comm.Split(int(comm.rank < ranks), comm.rank)
    return part if comm.rank < ranks else None


# --- replicas by ChainerMN's updater, each with data of its own --------------

class Net(chainer.Chain):
    """Dropout makes it depend on random numbers, as real ones do."""

    def __init__(self, width=8):
        super().__init__(
            l1=L.Linear(None, width), bn=L.BatchNormalization(width),
            l2=L.Linear(width, 3))

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


def save(trainer, comm, out):
    """Writes a snapshot of what a trainer is now; an error if it fails."""
    Snapshot(comm, directory=str(out))(trainer)


def names(folder):
    """The snapshots in a folder, oldest first."""
    return [os.path.basename(path) for path in find_snapshots(str(folder))]


def weights(trainer):
    """All bits of the model, statistics of batch normalisation included."""
    return bits(trainer.updater.get_optimizer('main').target)
