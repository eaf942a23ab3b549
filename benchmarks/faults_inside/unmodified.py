"""A ChainerMN script as users have it: it knows nothing of snapshots.

It is one of the three jobs of the campaign of faults.
"""
import argparse
import time

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--updates', type=int, default=400)
    parser.add_argument('--seconds', type=float, default=0.02,
                        help='that an update takes longer')
    parser.add_argument('--out', default='result')
    args = parser.parse_args()

    comm = chainermn.create_communicator('naive')
    np.random.seed(comm.rank)
    model = L.Classifier(chainer.Sequential(
        L.Linear(64, 256), F.relu, L.Linear(256, 256), F.relu,
        L.Linear(256, 10)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    train = None
    if comm.rank == 0:
        random = np.random.RandomState(0)
        labels = random.randint(0, 10, 4000).astype(np.int32)
        images = np.eye(10, 64, dtype=np.float32)[labels]
        images += 0.5 * random.rand(4000, 64).astype(np.float32)
        train = chainer.datasets.TupleDataset(images, labels)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(train, 16), optimizer)
    trainer = training.Trainer(updater, (args.updates, 'iteration'),
                               out=args.out)
    trainer.extend(lambda trainer: time.sleep(args.seconds),
                   trigger=(1, 'iteration'), name='work')
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(50, 'iteration')))
    trainer.run()


if __name__ == '__main__':
    main()
