"""How long training stands still for a snapshot.

    python benchmarks/snapshots.py

A model of 25 M parameters with Adam and ``create_communicator('fp8')``, so
that every rank has residuals of its own.  A clock after each update gives

* the update: median of those without a snapshot near them;
* first: by how much the update with the first snapshot is longer, on the
  slowest rank;
* still: the same of the later ones, the median;
* slower: by how much all later updates together are longer until the file is
  whole, as disk and messages share the cores with the training;
* whole: seconds from the snapshot to the whole file.

``--ways`` chooses between ``Snapshot`` and ``save``, which writes while all
ranks wait.
"""
from __future__ import annotations

import glob
import os
import pathlib
import statistics
import tempfile
import time
import warnings

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import Snapshot

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer, extension
from chainer.training.updaters import StandardUpdater
from environment import describe, parser, ranks_of, start, write_json
from mpi4py import MPI

WAYS = 'Snapshot', 'waiting'
WIDTH, LAYERS, BATCH = 1024, 24, 64
FIRST, APART = 6, 24        # updates before the first snapshot, and between


class Clock(extension.Extension):
    """The time after each update, and whether the newest file is there."""

    trigger = 1, 'iteration'
    priority = -200             # after Snapshot

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.whole: dict[int, float] = {}
        self._expected: list[int] = []

    def __call__(self, trainer: Trainer) -> None:
        self.times.append(time.perf_counter())
        iteration = trainer.updater.iteration
        if is_due(iteration):
            self._expected.append(iteration)
        for number in self._expected:
            folder = os.path.join(trainer.out, f'snapshot_iter_{number}.ranks')
            if number not in self.whole and len(glob.glob(
                    f'{folder}/*')) == MPI.COMM_WORLD.size:
                self.whole[number] = self.times[-1]


def is_due(iteration: int) -> bool:
    return iteration >= FIRST and (iteration - FIRST) % APART == 0


def make_trainer(comm: MPI.Comm, out: str, snapshots: int) -> tuple:
    communicator = create_communicator('fp8', comm, warmup=1)
    numpy.random.seed(0)
    model = L.Classifier(chainer.Sequential(*[
        step for _ in range(LAYERS)
        for step in (L.Linear(WIDTH, WIDTH), F.relu)]))
    random = numpy.random.RandomState(comm.rank)
    data = chainer.datasets.TupleDataset(
        random.rand(2 * BATCH, WIDTH).astype('f'),
        random.randint(0, WIDTH, 2 * BATCH).astype('i'))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), communicator).setup(model)
    updater = StandardUpdater(
        chainer.iterators.SerialIterator(data, BATCH), optimizer)
    trainer = Trainer(
        updater, (FIRST + snapshots * APART - 1, 'iteration'), out)
    return trainer, communicator, sum(
        parameter.size for parameter in model.params())


def measure(comm: MPI.Comm, way: str, out: str, snapshots: int) -> dict:
    """Trains with snapshots on the way."""
    trainer, communicator, size = make_trainer(comm, out, snapshots)

    def due(trainer: Trainer) -> bool:
        return is_due(trainer.updater.iteration)
    if way == 'Snapshot':
        trainer.extend(Snapshot(communicator, retain=1), trigger=due)
    else:
        trainer.extend(
            lambda trainer: Snapshot(communicator, retain=1)(trainer),
            trigger=due, priority=-100, name='waiting')
    clock = Clock()
    trainer.extend(clock)
    comm.Barrier()
    trainer.run()
    return summary(comm, clock, out) | {'parameters': size}


def summary(comm: MPI.Comm, clock: Clock, out: str) -> dict:
    seconds = numpy.diff(clock.times)
    whole = comm.bcast(clock.whole)     # in updates of rank 0's clock
    numbers = [number for number in range(1, len(seconds) + 1)
               if is_due(number)]
    ends = {number: 1 + min(
        place for place, at in enumerate(comm.bcast(clock.times))
        if at >= whole.get(number, numpy.inf) or place == len(seconds))
        for number in numbers}
    quiet = [seconds[number - 1] for number in range(3, len(seconds) + 1)
             if not any(due <= number <= ends[due] for due in numbers)]
    update = statistics.median(quiet)
    still = [seconds[number - 1] - update for number in numbers]
    slower = [sum(seconds[number:ends[number] - 1] - update)
              for number in numbers]
    files = list(pathlib.Path(out).glob('snapshot_iter_*.ranks/*.npz'))
    slowest = numpy.max(comm.allgather(still), 0).tolist()
    return {
        'update': comm.allreduce(update, MPI.MAX),
        'first': slowest[0],
        'still': statistics.median(slowest[1:]),
        'slower': statistics.median(
            numpy.max(comm.allgather(slower), 0).tolist()),
        'whole': statistics.median(
            whole[number] - clock.times[number - 1]
            for number in numbers) if comm.rank == 0 else 0,
        'bytes': max(file.stat().st_size for file in files)}


def rank(comm: MPI.Comm, job: dict) -> dict:
    """What one rank of a job does."""
    warnings.filterwarnings('error', 'snap')
    return measure(comm, **job)


def main() -> None:
    given = parser(__doc__)
    given.add_argument('--ranks', type=int, nargs='*', default=[2, 4])
    given.add_argument('--ways', nargs='*', choices=WAYS, default=WAYS)
    given.add_argument('--snapshots', type=int, default=3, metavar='N',
                       help='how many are written, one after another')
    options = given.parse_args()
    print(describe())
    print('ranks  way         update [s]  first [s]  still [s]  slower [s]'
          '  whole [s]  file [MB]', flush=True)
    data = []
    for ranks in options.ranks:
        for way in options.ways:
            with tempfile.TemporaryDirectory() as folder:
                found = ranks_of('snapshots.py', {
                    'way': way, 'out': folder,
                    'snapshots': options.snapshots}, ranks)
            data.append({'ranks': ranks, 'way': way, **found})
            print(f'{ranks:5}  {way:10}{found["update"]:12.2f}'
                  f'{found["first"]:11.2f}{found["still"]:11.2f}{found["slower"]:12.2f}'
                  f'{found["whole"]:11.2f}{found["bytes"] / 1e6:11.0f}',
                  flush=True)
    if options.json:
        write_json(options.json, {'snapshots': data})


if __name__ == '__main__':
    start(main, rank)
