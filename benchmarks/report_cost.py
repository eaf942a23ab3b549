"""What recording a run takes: the same training with and without RunReport.

    .venv/bin/mpiexec -n 2 .venv/bin/python benchmarks/report_cost.py

Trainings with and without take turns, so that both have the same machine.  A
step is the median of a training's updates; what writing takes at the ends of
epochs is in the time of the whole training, without the last page.
"""
import argparse
import statistics
import tempfile
import time

from chainer_fp8pipe import RunReport, create_communicator

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer, extension
from chainer.training.updaters import StandardUpdater
from environment import describe, write_json
from mpi4py import MPI

_SKIPPED = 10       # updates, which warm up


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--widths', type=int, nargs='+',
                        default=[128, 512],
                        help='of layers (default: 128 512)')
    parser.add_argument('--updates', type=int, default=400,
                        help='of a training (default: 400)')
    parser.add_argument('--rounds', type=int, default=5,
                        help='trainings of each kind (default: 5)')
    parser.add_argument('--overlap', default=False,
                        help='of the communicator (default: none)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw data to FILE')
    return parser.parse_args()


class Ends(extension.Extension):
    """Notes when updates end."""

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_WRITER + 100

    def __init__(self):
        self.times = []

    def __call__(self, trainer):
        self.times.append(time.perf_counter())


def train(width, updates, overlap, is_recorded):
    """Seconds of a step, and of all, per update."""
    comm = create_communicator('fp8', warmup=0, overlap=overlap)
    numpy.random.seed(0)
    model = L.Classifier(chainer.Sequential(
        L.Linear(width, width), F.relu, L.Linear(width, width), F.relu,
        L.Linear(width, 10)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01), comm).setup(model)
    data = chainer.datasets.TupleDataset(
        numpy.random.rand(64 * 100, width).astype('f'),
        numpy.random.randint(0, 10, 64 * 100).astype('i'))
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(StandardUpdater(
            chainer.iterators.SerialIterator(data, 64), optimizer),
            (updates, 'iteration'), out)
        ends = Ends()
        trainer.extend(ends)
        if is_recorded:
            trainer.extend(RunReport(comm))
        comm.mpi_comm.Barrier()
        trainer.run()
    comm.finalize()
    times = ends.times[_SKIPPED:]
    return (float(numpy.median(numpy.diff(times))),
            (times[-1] - times[0]) / (len(times) - 1))


def main():
    options = parse()
    rows = []
    for width in options.widths:
        # Without, with, with, without, ...: neither is always the second.
        order = [place % 4 in (1, 2) for place in range(2 * options.rounds)]
        train(width, 50, options.overlap, True)
        found = {False: [], True: []}
        for is_recorded in order:
            found[is_recorded].append(train(
                width, options.updates, options.overlap, is_recorded))
        rows.append({'width': width, 'without': found[False],
                     'with': found[True]})
    if MPI.COMM_WORLD.rank:
        return
    print(describe())
    print(f'{MPI.COMM_WORLD.size} ranks; milliseconds per update, the least '
          f'of {options.rounds} trainings of {options.updates} updates')
    print(f'{"width":>6}{"step: without":>15}{"with":>8}{"ratio":>8}'
          f'{"all: without":>15}{"with":>8}{"ratio":>8}{"us more":>10}')
    for row in rows:
        cells = ''
        for place in range(2):
            without, recorded = (
                min(times[place] for times in row[kind])
                for kind in ('without', 'with'))
            cells += (f'{1e3 * without:{15}.3f}{1e3 * recorded:8.3f}'
                      f'{recorded / without:8.4f}')
        more = statistics.median(one[0] - other[0] for one, other in zip(
            row['with'], row['without'], strict=True))
        print(f'{row["width"]:6}{cells}{1e6 * more:10.0f}')
    if options.json:
        write_json(options.json, {'rows': rows})


if __name__ == '__main__':
    main()
