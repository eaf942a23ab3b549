"""Trains a model that no rank has the memory for: each holds a part.

    mpiexec -n 4 python examples/train_large.py

The model is an ordinary Chain.  In deferred() nothing of it is allocated, and
partition() cuts it such that every rank stays below --memory.
"""
import json
import os

from chainer_fp8pipe import PipelineUpdater, deferred, partition

import chainer
import chainer.functions as F
import chainer.links as L
import common
from chainer import training
from chainer.dataset import concat_examples
from chainer.initializers import HeNormal
from chainer.iterators import SerialIterator
from chainer.training import extensions
from mpi4py import MPI

MICRO_BATCHES = 4


class Deep(chainer.Chain):
    """Dense layers of one width."""

    def __init__(self, width, layers):
        super().__init__()
        with self.init_scope():
            self.hidden = chainer.ChainList(*(
                L.Linear(size, width, initialW=HeNormal())
                for size in [64, *(layers - 1) * [width]]))
            self.last = L.Linear(width, 10)

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.last(x)


def parse():
    parser = common.make_parser(__doc__, 'large', 3, 64, 0.05)
    common.add_counts(parser, ('width', 1280, 'units of a layer'),
                      ('layers', 9, 'of them'))
    parser.add_argument('--memory', default='70 MB', metavar='SIZE',
                        help='what a rank may use beyond the interpreter '
                        '(default: 70 MB)')
    return common.parse(parser)


def main():
    options = parse()
    comm = MPI.COMM_WORLD
    train_set, test_set = common.digits()
    common.seed_random(options.seed)        # the order of the images
    with deferred(seed=options.seed):
        model = L.Classifier(Deep(options.width, options.layers))
    parameters = model.count_params()
    example = concat_examples(train_set[:options.batchsize // MICRO_BATCHES])
    model = partition(model, example, comm, memory=options.memory,
                      micro_batches=MICRO_BATCHES,
                      optimizer=chainer.optimizers.MomentumSGD())
    common.say(f'{parameters / 1e6:.1f} M parameters\n{model}\n')

    optimizer = chainer.optimizers.MomentumSGD(options.lr).setup(model)
    updater = PipelineUpdater(SerialIterator(train_set, options.batchsize),
                              optimizer, comm, micro_batches=MICRO_BATCHES)
    trainer = training.Trainer(updater, (options.epoch, 'epoch'), options.out)
    trainer.extend(extensions.Evaluator(
        SerialIterator(test_set, len(test_set), repeat=False, shuffle=False),
        model, eval_func=updater.evaluate))
    common.run(trainer, comm, options,
               ['main/loss', 'validation/main/accuracy'])

    # Parameters, gradients and momentum; others' have no arrays here.
    held = comm.gather(sum(3 * parameter.array.nbytes
                           for parameter in model.params()))
    if comm.rank == 0:
        accuracy = 100 * float(
            trainer.observation['validation/main/accuracy'])
        print(f'{accuracy:.1f} % of the test images; ranks 0 to '
              f'{comm.size - 1} held '
              + ', '.join(f'{size / 1e6:.0f}' for size in held)
              + f' MB of {12 * parameters / 1e6:.0f} MB of parameters, '
              f'gradients and momentum (--memory {options.memory})')
        with open(os.path.join(options.out, 'held.json'), 'w') as file:
            json.dump({'held': held, 'whole': 12 * parameters}, file)


if __name__ == '__main__':
    main()
