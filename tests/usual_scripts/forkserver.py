#!/usr/bin/env python
"""ChainerMN's ImageNet example in small: processes read, by forkserver."""
from __future__ import print_function

import argparse
import multiprocessing

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions


class PreprocessedDataset(chainer.dataset.DatasetMixin):
    def __init__(self, labels, mean):
        self.base, self.mean = labels, mean.astype(np.float32)

    def __len__(self):
        return len(self.base)

    def get_example(self, i):
        label = self.base[i]
        image = np.random.RandomState(label).rand(3, 6, 6)
        return image.astype(np.float32) - self.mean, np.int32(label % 4)


class NIN(chainer.Chain):
    insize = 6

    def __init__(self):
        super(NIN, self).__init__()
        conv_init = chainer.initializers.HeNormal()
        with self.init_scope():
            self.mlpconv1 = L.MLPConvolution2D(
                None, (8, 8), 3, conv_init=conv_init)
            self.mlpconv2 = L.MLPConvolution2D(
                None, (8, 4), 3, conv_init=conv_init)

    def __call__(self, x, t):
        h = self.mlpconv2(F.relu(self.mlpconv1(x)))
        h = F.reshape(F.average_pooling_2d(h, h.data.shape[2]), (-1, 4))
        loss = F.softmax_cross_entropy(h, t)
        chainer.report({'loss': loss, 'accuracy': F.accuracy(h, t)}, self)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--batchsize', '-B', type=int, default=32)
    parser.add_argument('--communicator', default='naive')
    parser.add_argument('--loaderjob', '-j', type=int, default=2)
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        print('Num process (COMM_WORLD): {}'.format(comm.size))
    np.random.seed(0)
    model = NIN()
    mean = np.full((3, 1, 1), 0.5)
    train = PreprocessedDataset(list(range(32)), mean) if (
        comm.rank == 0) else None
    train = chainermn.scatter_dataset(train, comm, shuffle=False)
    multiprocessing.set_start_method('forkserver')
    train_iter = chainer.iterators.MultiprocessIterator(
        train, args.batchsize // comm.size, shuffle=False,
        n_processes=args.loaderjob)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(lr=0.1, momentum=0.9), comm)
    optimizer.setup(model)
    updater = training.StandardUpdater(train_iter, optimizer, device=-1)
    trainer = training.Trainer(updater, (3, 'epoch'), args.out)
    if comm.rank == 0:
        trainer.extend(extensions.DumpGraph('main/loss'))
        trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
        trainer.extend(extensions.observe_lr(), trigger=(1, 'iteration'))
        trainer.extend(extensions.PrintReport(
            ['epoch', 'iteration', 'main/loss', 'main/accuracy', 'lr']))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.run()
    if comm.rank == 0:
        chainer.serializers.save_npz(args.out + '/model.npz', model)


if __name__ == '__main__':
    main()
