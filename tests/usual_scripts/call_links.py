"""train_mnist.py of Chainer 2: links have __call__ and look at values.

Its batches are arrays, and an extension looks at the loss.
"""
from __future__ import print_function

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions


class SpectralLinear(chainer.Chain):
    """One power iteration a call; u is kept in snapshots."""

    def __init__(self, n_in, n_out):
        super(SpectralLinear, self).__init__()
        with self.init_scope():
            self.l = L.Linear(n_in, n_out)
        self.add_persistent('u', np.ones(n_out, np.float32))

    def __call__(self, x):
        W = self.l.W.data
        v = W.T.dot(self.u)
        v /= np.linalg.norm(v) + 1e-8
        u = W.dot(v)
        sigma = np.linalg.norm(u)
        return F.linear(x, self.l.W / float(sigma), self.l.b)


class Gate(chainer.Chain):
    def __init__(self, n):
        super(Gate, self).__init__()
        with self.init_scope():
            self.gate = L.Linear(n, n)

    def __call__(self, x):
        g = F.sigmoid(self.gate(x))
        if np.isnan(g.data).any():
            raise ValueError('diverged')
        mask = self.xp.zeros(x.shape, np.float32)
        mask[g.data > 0.1] = 1
        return x * g * mask


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__()
        with self.init_scope():
            self.l1 = SpectralLinear(6, n_units)
            self.gate = Gate(n_units)
            self.l2 = L.Linear(None, n_units)
            self.l3 = L.Linear(None, n_out)

    def __call__(self, x):
        h1 = self.gate(F.relu(self.l1(x)))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


class Batches(chainer.dataset.Iterator):
    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size = dataset, batch_size
        self.order = np.random.permutation(len(dataset))
        self.position = self.epoch = 0
        self.is_new_epoch = False

    def __next__(self):
        rows = self.order[self.position:self.position + self.batch_size]
        self.position = (self.position + self.batch_size) % len(self.dataset)
        self.is_new_epoch = self.position == 0
        self.epoch += self.is_new_epoch
        return tuple(map(np.stack, zip(*[self.dataset[i] for i in rows])))

    @property
    def epoch_detail(self):
        return self.epoch + float(self.position) / len(self.dataset)


def as_it_is(batch, device):
    return batch


def stop_at_nan(trainer):
    if np.isnan(float(trainer.observation['main/loss'].data)):
        raise RuntimeError('nan')


def main():
    parser = argparse.ArgumentParser(description='Chainer example: MNIST')
    parser.add_argument('--gpu', '-g', type=int, default=-1)
    args = parser.parse_args()
    print('GPU: {}'.format(args.gpu))
    np.random.seed(0)
    model = L.Classifier(MLP(8, 3))
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)
    x = np.random.rand(32, 6).astype(np.float32)
    t = (x.sum(axis=1) * 3).astype(np.int) % 3
    data = chainer.datasets.TupleDataset(x, t.astype(np.int32))
    train, test = chainer.datasets.split_dataset_random(data, 24, seed=0)
    train_iter = Batches(train, 8)
    test_iter = chainer.iterators.SerialIterator(
        test, 8, repeat=False, shuffle=False)
    updater = training.StandardUpdater(
        train_iter, optimizer, converter=as_it_is, device=args.gpu)
    trainer = training.Trainer(updater, (3, 'epoch'))
    trainer.extend(extensions.Evaluator(test_iter, model, device=args.gpu))
    trainer.extend(extensions.LogReport())
    trainer.extend(stop_at_nan, trigger=(1, 'iteration'))
    trainer.run()
    chainer.serializers.save_npz('result/model.npz', model)


if __name__ == '__main__':
    main()
