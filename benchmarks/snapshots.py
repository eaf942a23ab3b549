"""How long training stands still for a snapshot.

    python benchmarks/snapshots.py

A model of 25 M parameters with Adam and ``create_communicator('fp8')``, so
that every rank has residuals of its own.  Of the slowest rank: the median
update without a snapshot near it, and by how much an update with a snapshot is
longer, the first one and the median of the later ones.  ``waiting`` is a
snapshot that all ranks wait for until it is written.
"""
from __future__ import annotations

import statistics
import tempfile
import time

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import Snapshot

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater
from environment import describe, parser, ranks_of, start

WAYS = 'Snapshot', 'waiting'
WIDTH, LAYERS, BATCH, SNAPSHOTS = 1024, 24, 64, 3
FIRST, APART = 6, 24        # updates before the first snapshot, and between


def is_due(trainer: Trainer) -> bool:
    since = trainer.updater.iteration - FIRST
    return since >= 0 and since % APART == 0


def rank(comm, job: dict) -> dict:
    """Trains with snapshots on the way."""
    communicator = create_communicator('fp8', comm, warmup=1)
    numpy.random.seed(0)
    model = L.Classifier(chainer.Sequential(*[
        step for _ in range(LAYERS)
        for step in (L.Linear(WIDTH, WIDTH), F.relu)]))
    random = numpy.random.RandomState(comm.rank)
    data = chainer.datasets.TupleDataset(
        random.rand(2 * BATCH, WIDTH).astype('f'),
        random.randint(0, WIDTH, 2 * BATCH).astype('i'))
    trainer = Trainer(StandardUpdater(
        chainer.iterators.SerialIterator(data, BATCH),
        chainermn.create_multi_node_optimizer(
            chainer.optimizers.Adam(), communicator).setup(model)),
        (FIRST + SNAPSHOTS * APART - 1, 'iteration'), job['out'])
    if job['way'] == 'Snapshot':
        trainer.extend(Snapshot(communicator, retain=1), trigger=is_due)
    else:       # a new one is written before its call returns
        trainer.extend(
            lambda trainer: Snapshot(communicator, retain=1)(trainer),
            trigger=is_due, priority=-100, name='waiting')
    times = [time.perf_counter()]
    trainer.extend(lambda trainer: times.append(time.perf_counter()),
                   name='clock', trigger=(1, 'iteration'), priority=-200)
    comm.Barrier()
    trainer.run()
    seconds = numpy.max(comm.allgather(numpy.diff(times)), 0)
    due = numpy.arange(FIRST - 1, len(seconds), APART)
    # A file that is being written shares the cores with later updates.
    update = float(numpy.median([
        seconds[at] for at in range(2, len(seconds))
        if not any(0 <= at - one < APART // 2 for one in due)]))
    still = (seconds[due] - update).tolist()
    return {'update': update, 'first': still[0],
            'still': statistics.median(still[1:])}


def main() -> None:
    parser(__doc__).parse_args()
    print(describe())
    print('ranks  way         update [s]  first [s]  still [s]', flush=True)
    for ranks in (2, 4):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found = ranks_of('snapshots.py', {
                    'way': way, 'out': folder}, ranks)
            print(f'{ranks:5}  {way:10}{found["update"]:12.2f}'
                  f'{found["first"]:11.2f}{found["still"]:11.2f}', flush=True)


if __name__ == '__main__':
    start(main, rank)
