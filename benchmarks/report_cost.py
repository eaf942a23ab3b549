"""What recording a run takes: the same training with and without RunReport.

    .venv/bin/mpiexec -n 2 .venv/bin/python benchmarks/report_cost.py

Each round is two short trainings, one with and one without, in turns first: a
machine's pace changes by more than a report costs, so that only trainings
beside each other are compared.  A step is the median of a training's updates;
what writing takes at the ends of epochs is in the time of the whole training,
without the last page.
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
    parser.add_argument('--updates', type=int, default=150,
                        help='of a training (default: 150)')
    parser.add_argument('--rounds', type=int, default=21,
                        help='trainings of each kind (default: 21)')
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


def middle(differences):
    """Their median, and an interval that has it with 95 %.

    The interval is that of the sign test, which assumes nothing about how
    the differences are distributed.
    """
    ordered, count = sorted(differences), len(differences)
    place = max(int(count / 2 - 0.98 * count ** 0.5), 0)
    return (statistics.median(ordered), ordered[place],
            ordered[count - 1 - place])


def differences(row, place):
    """Seconds of an update without, and how many more each pair had with."""
    without, recorded = (
        [times[place] for times in row[kind]] for kind in ('without', 'with'))
    return statistics.median(without), [
        more - less for more, less in zip(recorded, without, strict=True)]


def main():
    options = parse()
    rows = []
    for width in options.widths:
        train(width, 50, options.overlap, True)
        found = {False: [], True: []}
        for number in range(options.rounds):
            for is_recorded in (number % 2 == 0, number % 2 != 0):
                found[is_recorded].append(train(
                    width, options.updates, options.overlap, is_recorded))
        rows.append({'width': width, 'without': found[False],
                     'with': found[True]})
    if MPI.COMM_WORLD.rank:
        return
    print(describe())
    print(f'{MPI.COMM_WORLD.size} ranks; per update, medians of '
          f'{options.rounds} pairs of trainings of {options.updates} updates, '
          'and their 95 % intervals')
    print(f'{"width":>6}{"step, ms":>10}{"more, us":>10}{"from":>8}{"to":>8}'
          f'{"share":>9}{"of all":>9}')
    for row in rows:
        step, more = differences(row, 0)
        whole, of_all = differences(row, 1)
        print(f'{row["width"]:6}{1e3 * step:10.3f}'
              + ''.join(f'{1e6 * one:{width}.0f}' for one, width
                        in zip(middle(more), (10, 8, 8), strict=True))
              + f'{statistics.median(more) / step:9.2%}'
              + f'{statistics.median(of_all) / whole:9.2%}')
    if options.json:
        write_json(options.json, {'rows': rows})


if __name__ == '__main__':
    main()
