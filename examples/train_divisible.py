"""Trains a list of layers that is divided over ranks, as a pipeline.

    mpiexec -n 4 python examples/train_divisible.py

makes 2 stages with some of the layers each, and 2 replicas of each stage,
which average their gradients in fp8.  timeline.svg shows what the ranks did
in the last update; model.npz is the whole model.
"""
import os

from chainer_fp8pipe import (
    Divisible,
    PipelineUpdater,
    ProcessGrid,
    ReplicaIterator,
    create_communicator,
    lazy,
)
from chainer_fp8pipe.training.extensions import (
    PipelineTimeline,
    save_whole_model,
)

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import common
from chainer import training
from chainer.initializers import HeNormal
from chainer.training import extensions
from mpi4py import MPI


class Net(Divisible):
    """Dense layers.  ``lazy``: only the rank that owns one allocates it."""

    def __init__(self, depth, width, seed):
        super().__init__(seed=seed)
        for inputs in [64, *(depth - 2) * [width]]:
            self.append(lazy(L.Linear, inputs, width, initialW=HeNormal()))
            self.append(F.relu)
        self.append(lazy(L.Linear, width, 10))


def parse():
    parser = common.make_parser(__doc__, 'divisible', 10, 32, 0.05)
    common.add_counts(
        parser,
        ('pipeline', min(2, MPI.COMM_WORLD.size),
         'stages, a divisor of the number of ranks'),
        ('micro-batches', 4, 'parts of a batch'),
        ('depth', 8, 'dense layers'), ('width', 256, 'their outputs'))
    return common.parse(parser)


def main():
    options = parse()
    grid = ProcessGrid(MPI.COMM_WORLD, options.pipeline)
    train_set, test_set = common.digits()
    updates = len(train_set) * options.epoch // options.batchsize
    model = Net(options.depth, options.width, options.seed).stage(grid)
    common.say(f'{grid.stages} stages x {grid.replicas} replicas\n\n{model}\n')

    optimizer = chainer.optimizers.MomentumSGD(options.lr)
    if grid.replicas > 1:
        comm = create_communicator('fp8', grid.data, warmup=updates // 20)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))

    iterator = ReplicaIterator(train_set, options.batchsize, grid=grid,
                               seed=options.seed)
    updater = PipelineUpdater(iterator, optimizer, grid, seed=options.seed,
                              micro_batches=options.micro_batches)
    trainer = training.Trainer(updater, (options.epoch, 'epoch'), options.out)
    iterator = ReplicaIterator(test_set, len(test_set), grid=grid,
                               repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(iterator, model,
                                     eval_func=updater.evaluate)
    if grid.replicas > 1:
        evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)
    trainer.extend(common.follow_cosine(options.lr, updates),
                   trigger=(1, 'iteration'))
    trainer.extend(PipelineTimeline(updater, updates))
    common.run(trainer, grid, options,
               ['main/loss', 'validation/main/accuracy'])

    save_whole_model(os.path.join(options.out, 'model.npz'), model, grid)
    held = grid.comm.gather(model.count_params())
    if grid.comm.rank == 0:
        accuracy = trainer.observation['validation/main/accuracy']
        print(f'{100 * float(accuracy):.2f} % of the test images; ranks 0 to '
              f'{grid.comm.size - 1} hold '
              + ', '.join(f'{number:,}' for number in held)
              + f' parameters\n{os.path.join(options.out, "timeline.svg")} '
              'shows the last update')


if __name__ == '__main__':
    main()
