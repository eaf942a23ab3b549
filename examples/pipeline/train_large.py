"""Trains a model that no rank has the memory for: each holds a part.

    mpiexec -n 4 python examples/pipeline/train_large.py

The model is an ordinary Chain.  In deferred() nothing of it is allocated, and
partition() cuts it such that every rank stays below --memory.
"""
import argparse
import json
import os
import sys

from chainer_fp8pipe import PipelineUpdater, deferred, partition
from chainer_fp8pipe.planning import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
from chainer.dataset import concat_examples
from chainer.iterators import SerialIterator
from mpi4py import MPI

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                'digits'))
from data import load
from train_digits import only_rank_0_prints, seed_random

_PARTS = 4      # micro-batches


class Deep(chainer.Chain):
    """Dense layers of one width."""

    def __init__(self, width, layers):
        super().__init__()
        with self.init_scope():
            self.hidden = chainer.ChainList(*(
                L.Linear(size, width, initialW=chainer.initializers.HeNormal())
                for size in [64, *(layers - 1) * [width]]))
            self.last = L.Linear(width, 10)

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.last(x)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (
            ('width', 1280, 'units of a layer'), ('layers', 9, 'of them'),
            ('epoch', 3, 'passes over the digits'),
            ('batchsize', 64, 'images per update')):
        parser.add_argument(f'--{name}', type=int, default=default,
                            help=f'{what} (default: {default})')
    parser.add_argument('--memory', default='70 MB', metavar='SIZE',
                        help='what a rank may use beyond the interpreter '
                        '(default: 70 MB)')
    parser.add_argument('--out', metavar='FILE', help='write results as JSON')
    with only_rank_0_prints():
        return parser.parse_args()


def main():
    options = parse()
    comm = MPI.COMM_WORLD
    train_set, test_set = comm.bcast(
        load('digits') if comm.rank == 0 else None)
    seed_random(0)      # the order of the images
    with deferred(seed=0):
        model = L.Classifier(Deep(options.width, options.layers))
    parameters = model.count_params()
    example = concat_examples(train_set[:options.batchsize // _PARTS])
    try:
        partition(model, example, comm, memory=options.memory,
                  micro_batches=_PARTS, optimizer_arrays=1)
    except DoesNotFit as error:
        with only_rank_0_prints():
            sys.exit(str(error) if comm.rank == 0 else 1)
    updater = PipelineUpdater(
        SerialIterator(train_set, options.batchsize),
        chainer.optimizers.MomentumSGD(0.05).setup(model), comm,
        micro_batches=_PARTS)
    if comm.rank == 0:
        print(f'pipeline: {parameters / 1e6:.1f} M parameters on {comm.size} '
              'ranks ', end='', flush=True)
    while updater.epoch < options.epoch:
        epoch = updater.epoch
        updater.update()
        if comm.rank == 0 and updater.epoch > epoch:
            print('.', end='', flush=True)
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    observation = {}
    with reporter.scope(observation):
        updater.evaluate(*concat_examples(test_set[:]))
    # Parameters, gradients and momentum; others' have no arrays here.
    held = comm.gather(sum(3 * parameter.array.nbytes
                           for parameter in model.partition.own.values()))
    if comm.rank == 0:
        accuracy = 100 * float(observation['main/accuracy'])
        whole = 3 * 4 * parameters
        print(f' {accuracy:.1f} % accuracy\nranks 0 to {comm.size - 1} held '
              + ', '.join(f'{size / 1e6:.0f}' for size in held)
              + f' MB of {whole / 1e6:.0f} MB of parameters, gradients and '
              f'momentum (--memory {options.memory})')
        if options.out:
            with open(options.out, 'w') as file:
                json.dump({'held': held, 'whole': whole,
                           'accuracy': accuracy}, file)


if __name__ == '__main__':
    main()
