"""Generates text: lists of arrays, NStepLSTM, an extension that samples from
the model, and a sample at the end."""
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions


def convert(batch, device):
    def to_device(x):
        if device is not None and device >= 0:
            return chainer.cuda.to_gpu(x, device)
        return x
    return {'xs': [to_device(x) for x in batch]}


class CharLM(chainer.Chain):
    def __init__(self, n_vocab, n_units):
        super(CharLM, self).__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_vocab, n_units, ignore_label=-1)
            self.lstm = L.NStepLSTM(2, n_units, n_units, 0.0)
            self.out = L.Linear(n_units, n_vocab)

    def forward(self, xs):
        ts = F.concat([x[1:] for x in xs], axis=0)
        lengths = np.cumsum([len(x) - 1 for x in xs])[:-1]
        exs = F.split_axis(self.embed(F.concat(
            [x[:-1] for x in xs], axis=0)), lengths, 0)
        _, _, hs = self.lstm(None, None, exs)
        loss = F.softmax_cross_entropy(self.out(F.concat(hs, axis=0)), ts)
        chainer.report({'loss': loss}, self)
        return loss

    def sample(self, first, length):
        """The likeliest text."""
        found, h, c = [first], None, None
        with chainer.no_backprop_mode(), chainer.using_config('train', False):
            for _ in range(length):
                x = self.embed(self.xp.asarray(found[-1:], np.int32))
                h, c, ys = self.lstm(h, c, [x])
                p = F.softmax(self.out(ys[0])).array[0]
                found.append(int(p.argmax()))
        return found


class Sampler(training.Extension):
    trigger = 1, 'epoch'
    priority = training.PRIORITY_WRITER

    def __init__(self, model):
        self.model = model

    def __call__(self, trainer):
        found = self.model.sample(1, 6)
        norm = sum(float((p.array ** 2).sum()) for p in self.model.params())
        chainer.report({'sampled': sum(found), 'norm': norm}, self.model)
        print('sample:', found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--device', '-d', default='-1')
    parser.add_argument('--out', default='result')
    args = parser.parse_args()
    np.random.seed(0)
    texts = [(np.arange(4 + step // 4 % 3) * step % 9).astype(np.int32)
             for step in range(1, 17)]
    device = chainer.get_device(int(args.device))
    device.use()
    model = CharLM(9, 8)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(0.02).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5.0))
    train_iter = chainer.iterators.SerialIterator(texts, 8, shuffle=False)
    updater = training.updaters.StandardUpdater(
        train_iter, optimizer, converter=convert, device=device)
    trainer = training.Trainer(updater, (2, 'epoch'), out=args.out)
    trainer.extend(Sampler(model))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'main/sampled']))
    trainer.run()
    print('at the end:', model.sample(2, 4))
    model.to_cpu()
    chainer.serializers.save_npz(args.out + '/model.npz', model)


if __name__ == '__main__':
    main()
