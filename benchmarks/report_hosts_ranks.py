"""The ranks of ``report_hosts.py``: short trainings, each with its record.

    report_hosts_ranks.py FOLDER SETTINGS

``SETTINGS`` are those of :class:`Settings`, as JSON.  The record of training
N is in ``FOLDER/N``.
"""
from __future__ import annotations

import json
import os
import sys
import warnings
from typing import NamedTuple

from chainer_fp8pipe import RunReport, create_communicator
from chainer_fp8pipe.mpi.failure.abort import abort_on_exception

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

_BATCH = 16
_EPOCH = 10         # updates


class Settings(NamedTuple):
    """What a start of the ranks does.

    Attributes:
        runs: Trainings, one after the other.
        width: Of the model's hidden layer.
        epochs: Of a training.
        overlap: Of the communicator.
        work: Products of matrices in each forward pass besides the model's
            own, each of some 0.2 ms.
        slow: The rank that computes more of them; -1: none does.
        factor: How many times as many.
    """

    runs: int = 1
    width: int = 256
    epochs: int = 3
    overlap: str = ''
    work: int = 0
    slow: int = -1
    factor: float = 1.0


class Worked(chainer.Chain):
    """A classifier whose forward pass keeps the core busy for longer."""

    def __init__(self, width, products):
        super().__init__()
        with self.init_scope():
            self.classifier = L.Classifier(chainer.Sequential(
                L.Linear(784, width), F.relu, L.Linear(width, width), F.relu,
                L.Linear(width, 10)))
        self._products = products
        self._matrix = numpy.ones((160, 160), numpy.float32) / 160

    def forward(self, *batch):
        for _ in range(self._products):
            self._matrix = self._matrix @ self._matrix
        return self.classifier(*batch)


def train(settings, out):
    comm = create_communicator('fp8', warmup=0,
                               overlap=settings.overlap or False)
    rank = comm.rank
    numpy.random.seed(0)
    products = round(settings.work * (
        settings.factor if rank == settings.slow else 1))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01), comm).setup(
            Worked(settings.width, products))
    data = chainer.datasets.TupleDataset(
        numpy.random.rand(_BATCH * _EPOCH, 784).astype('f'),
        numpy.random.randint(0, 10, _BATCH * _EPOCH).astype('i'))
    trainer = Trainer(StandardUpdater(
        chainer.iterators.SerialIterator(data, _BATCH), optimizer),
        (settings.epochs, 'epoch'), out)
    trainer.extend(RunReport(comm, filename=None))
    MPI.COMM_WORLD.Barrier()
    trainer.run()
    comm.finalize()


def main():
    abort_on_exception()
    warnings.simplefilter('ignore', FutureWarning)
    folder, given = sys.argv[1:]
    settings = Settings(**json.loads(given))
    for run in range(settings.runs):
        train(settings, os.path.join(folder, str(run)))


if __name__ == '__main__':
    main()
