#!/usr/bin/env python
"""A GAN with an updater of its own, in the style of Chainer's DCGAN."""
from __future__ import print_function

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Variable, training
from chainer.training import extensions


class Generator(chainer.Chain):
    def __init__(self, n_hidden, n_out=8):
        self.n_hidden = n_hidden
        super(Generator, self).__init__()
        with self.init_scope():
            w = chainer.initializers.Normal(0.2)
            self.l0 = L.Linear(n_hidden, 16, initialW=w)
            self.l1 = L.Linear(16, n_out, initialW=w)
            self.bn0 = L.BatchNormalization(16)

    def make_hidden(self, batchsize):
        return np.random.uniform(
            -1, 1, (batchsize, self.n_hidden)).astype(np.float32)

    def __call__(self, z):
        return F.tanh(self.l1(F.relu(self.bn0(self.l0(z)))))


class Discriminator(chainer.Chain):
    def __init__(self):
        super(Discriminator, self).__init__()
        with self.init_scope():
            self.l0 = L.Linear(8, 16)
            self.l1 = L.Linear(16, 1)

    def __call__(self, x):
        return self.l1(F.leaky_relu(self.l0(x)))


class DCGANUpdater(chainer.training.updaters.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop('models')
        super(DCGANUpdater, self).__init__(*args, **kwargs)

    def update_core(self):
        gen_optimizer = self.get_optimizer('gen')
        dis_optimizer = self.get_optimizer('dis')
        batch = self.get_iterator('main').next()
        x_real = Variable(self.converter(batch, self.device))
        xp = chainer.cuda.get_array_module(x_real.data)
        y_real = self.dis(x_real)
        z = Variable(xp.asarray(self.gen.make_hidden(len(batch))))
        x_fake = self.gen(z)
        y_fake = self.dis(x_fake)

        loss = F.sum(F.softplus(-y_real)) / len(batch) + F.sum(
            F.softplus(y_fake)) / len(batch)
        self.dis.cleargrads()
        loss.backward()
        dis_optimizer.update()
        chainer.report({'loss': loss}, self.dis)
        loss = F.sum(F.softplus(-self.dis(self.gen(z)))) / len(batch)
        self.gen.cleargrads()
        loss.backward()
        gen_optimizer.update()
        chainer.report({'loss': loss}, self.gen)


def out_generated(gen, dst):
    @chainer.training.make_extension(trigger=(1, 'epoch'))
    def make_image(trainer):
        with chainer.using_config('train', False), \
                chainer.no_backprop_mode():
            x = gen(Variable(gen.make_hidden(4)))
        if not os.path.exists(dst):
            os.makedirs(dst)
        np.save(os.path.join(dst, 'image'), x.data)
    return make_image


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--gpu', '-g', type=int, default=-1)
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    np.random.seed(0)
    gen, dis = Generator(n_hidden=4), Discriminator()
    if args.gpu >= 0:
        chainer.cuda.get_device(args.gpu).use()
        gen.to_gpu()
        dis.to_gpu()

    def make_optimizer(model, alpha=0.01, beta1=0.5):
        optimizer = chainer.optimizers.Adam(alpha=alpha, beta1=beta1)
        optimizer.setup(model)
        optimizer.add_hook(chainer.optimizer.WeightDecay(0.0001), 'hook_dec')
        return optimizer
    train = np.random.normal(size=(24, 8)).astype(np.float32)
    train_iter = chainer.iterators.SerialIterator(train, 8)
    updater = DCGANUpdater(
        models=(gen, dis), iterator=train_iter, device=args.gpu,
        optimizer={'gen': make_optimizer(gen), 'dis': make_optimizer(dis)})
    trainer = training.Trainer(updater, (2, 'epoch'), out=args.out)
    trainer.extend(extensions.snapshot_object(gen, 'gen.npz'))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(['epoch', 'gen/loss', 'dis/loss']))
    trainer.extend(out_generated(gen, args.out + '/preview'))
    trainer.run()
    chainer.serializers.save_npz(os.path.join(args.out, 'model.npz'), dis)


if __name__ == '__main__':
    main()
