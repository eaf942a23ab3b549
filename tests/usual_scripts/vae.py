"""A variational auto-encoder as Chainer's example: the loss is a function
that the model makes, an extension draws what the model reconstructs."""
import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.functions.loss.vae import gaussian_kl_divergence
from chainer.training import extensions


class VAE(chainer.Chain):
    def __init__(self, n_in, n_latent, n_h):
        super(VAE, self).__init__()
        with self.init_scope():
            self.le1 = L.Linear(n_in, n_h)
            self.le2_mu = L.Linear(n_h, n_latent)
            self.le2_ln_var = L.Linear(n_h, n_latent)
            self.ld1 = L.Linear(n_latent, n_h)
            self.ld2 = L.Linear(n_h, n_in)

    def __call__(self, x, sigmoid=True):
        return self.decode(self.encode(x)[0], sigmoid)

    def encode(self, x):
        h1 = F.tanh(self.le1(x))
        return self.le2_mu(h1), self.le2_ln_var(h1)

    def decode(self, z, sigmoid=True):
        h2 = self.ld2(F.tanh(self.ld1(z)))
        return F.sigmoid(h2) if sigmoid else h2

    def get_loss_func(self, C=1.0, k=1):
        def lf(x):
            mu, ln_var = self.encode(x)
            batchsize = len(mu.data)
            rec_loss = 0
            for _ in range(k):
                z = F.gaussian(mu, ln_var)
                rec_loss += F.bernoulli_nll(
                    x, self.decode(z, sigmoid=False)) / (k * batchsize)
            self.rec_loss = rec_loss
            self.loss = self.rec_loss + C * gaussian_kl_divergence(
                mu, ln_var) / batchsize
            chainer.report(
                {'rec_loss': rec_loss, 'loss': self.loss}, observer=self)
            return self.loss
        return lf


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--gpu', default=-1, type=int)
    parser.add_argument('--out', '-o', default='results/')
    args = parser.parse_args()
    np.random.seed(0)
    model = VAE(16, 2, 8)
    optimizer = chainer.optimizers.Adam(0.01)
    optimizer.setup(model)
    images = np.random.rand(24, 16).astype(np.float32)
    train, test = images[:16], images[16:]
    train_iter = chainer.iterators.SerialIterator(train, 8)
    test_iter = chainer.iterators.SerialIterator(
        test, 8, repeat=False, shuffle=False)
    updater = training.updaters.StandardUpdater(
        train_iter, optimizer, device=args.gpu,
        loss_func=model.get_loss_func())
    trainer = training.Trainer(updater, (3, 'epoch'), out=args.out)
    trainer.extend(extensions.Evaluator(
        test_iter, model, device=args.gpu,
        eval_func=model.get_loss_func(k=2)))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'main/rec_loss']))
    trainer.run()
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        x1 = model(chainer.Variable(np.asarray(test[:2])))
    np.save(os.path.join(args.out, 'reconstructed'), x1.data)
    chainer.serializers.save_npz(os.path.join(args.out, 'model.npz'), model)


if __name__ == '__main__':
    main()
