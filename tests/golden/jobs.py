"""Jobs whose snapshots are kept in this folder.

``mpiexec -n 2 python -m tests.golden.jobs`` writes them anew.  That is right
only where the format of snapshots has changed on purpose: the files are there
to show that an older version's snapshots can be gone on from.
"""
import pathlib
import shutil
import sys
import tempfile

from chainer_fp8pipe import Divisible, PipelineUpdater, partition
from chainer_fp8pipe.training.extensions import Snapshot, resume

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.training import Trainer

from tests.training.extensions.helpers import make_trainer

FOLDER = pathlib.Path(__file__).parent
#: The iterations of the snapshot, and of the end.
STOP, LAST = 7, 12
REPLICAS = {
    'fp8': {},
    'fp8_paper': {},
    'float32': {'overlap': 'next_forward'},
}
PIPELINES = 'layers', 'chain'


class Net(chainer.Chain):
    """Loss inside, statistics, dropout and a parameter used twice."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(6, 6)
            self.norm = L.BatchNormalization(6)
            self.last = L.Linear(6, 3)

    def forward(self, x, t):
        h = F.relu(self.norm(self.first(x)))
        h = F.dropout(F.relu(self.first(h)), 0.2)
        return F.softmax_cross_entropy(self.last(h), t)


def job(comm, name, out):
    """A trainer, and what its snapshots are to be taken of.

    Args:
        comm: Two ranks.
        name: One of :data:`REPLICAS` or :data:`PIPELINES`.
        out: Folder of the results.
    """
    if name in REPLICAS:
        return make_trainer(comm, out, name=name, **REPLICAS[name])
    numpy.random.seed(0)
    rng = numpy.random.RandomState(3)
    x = rng.rand(40, 6).astype('f')
    t = rng.randint(0, 3, 40).astype('i')
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, t), 8)
    if name == 'layers':
        model = Divisible(L.Linear(6, 5), L.BatchNormalization(5), F.relu,
                          L.Linear(5, 3)).stage(comm, balance='layers')
    else:
        model = partition(Net(), (x[:2], t[:2]), comm, micro_batches=4,
                          profile=0)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    updater = PipelineUpdater(iterator, optimizer, comm, micro_batches=4)
    return Trainer(updater, (LAST, 'iteration'), str(out)), comm


def train(comm, name, out, last, resumed=False):
    """Runs a job up to an iteration, with a snapshot of that."""
    trainer, saved = job(comm, name, out)
    trainer.stop_trigger = chainer.training.get_trigger((last, 'iteration'))
    trainer.extend(Snapshot(saved), trigger=(last, 'iteration'))
    if resumed:
        resume(trainer, saved, str(out))
    trainer.run()


def path_of(name, iteration):
    return FOLDER / f'{name}_{iteration}.npz'


def write(comm):
    for name in [*REPLICAS, *PIPELINES]:
        out = pathlib.Path(comm.bcast(tempfile.mkdtemp()))
        for last in STOP, LAST:
            train(comm, name, out, last, resumed=last == LAST)
            if comm.rank == 0:
                shutil.copy(out / f'snapshot_iter_{last}.npz',
                            path_of(name, last))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(out)
            sys.stderr.write(f'{name}\n')


if __name__ == '__main__':
    from mpi4py import MPI
    write(MPI.COMM_WORLD)
