# encoding: utf-8
"""Attention is all you need, small: sentences of any length, masks, a rate
by a rule of its own, a translation after each epoch."""
from __future__ import division, print_function

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

PAD, BOS, EOS = 0, 1, 2


def seq2seq_pad_concat_convert(xy_batch, device, eos_id=EOS, bos_id=BOS):
    x_seqs, y_seqs = zip(*xy_batch)
    x_block = chainer.dataset.convert.concat_examples(
        x_seqs, device, padding=PAD)
    y_block = chainer.dataset.convert.concat_examples(
        y_seqs, device, padding=PAD)
    y_in = np.pad(y_block, ((0, 0), (1, 0)), 'constant',
                  constant_values=bos_id)
    y_out = np.pad(y_block, ((0, 0), (0, 1)), 'constant', constant_values=PAD)
    for i, seq in enumerate(y_seqs):
        y_out[i, len(seq)] = eos_id
    return x_block, y_in, y_out


class MultiHeadAttention(chainer.Chain):
    def __init__(self, n_units, h=2, self_attention=True):
        super(MultiHeadAttention, self).__init__()
        with self.init_scope():
            self.W_Q = L.Linear(n_units, n_units, nobias=True)
            self.W_KV = L.Linear(n_units, n_units * 2, nobias=True)
            self.out = L.Linear(n_units, n_units, nobias=True)
        self.h = h

    def __call__(self, x, z, mask):
        b, n, u = x.shape
        m = z.shape[1]
        q = F.reshape(self.W_Q(F.reshape(x, (b * n, u))), (b, n, u))
        kv = F.reshape(self.W_KV(F.reshape(z, (b * m, u))), (b, m, 2 * u))
        k, v = F.split_axis(kv, 2, axis=2)
        q, k, v = (F.concat(F.split_axis(a, self.h, axis=2), axis=0)
                   for a in (q, k, v))
        a = F.matmul(q, k, transb=True) * (u // self.h) ** -0.5
        mask = self.xp.concatenate([mask] * self.h, axis=0)
        a = F.where(mask, a, self.xp.full(a.shape, -np.inf, 'f'))
        a = F.softmax(a, axis=2)
        a = F.where(self.xp.isnan(a.data), self.xp.zeros(a.shape, 'f'), a)
        c = F.concat(F.split_axis(F.matmul(a, v), self.h, axis=0), axis=2)
        return F.reshape(self.out(F.reshape(c, (b * n, u))), (b, n, u))


class Block(chainer.Chain):
    def __init__(self, n_units):
        super(Block, self).__init__()
        with self.init_scope():
            self.attention = MultiHeadAttention(n_units)
            self.source = MultiHeadAttention(n_units, self_attention=False)
            self.ln = L.LayerNormalization(n_units, eps=1e-6)
            self.ff1 = L.Linear(n_units, n_units * 2)
            self.ff2 = L.Linear(n_units * 2, n_units)

    def __call__(self, e, source, xx_mask, xy_mask):
        e = e + F.dropout(self.attention(e, e, xx_mask), 0.)
        if source is not None:
            e = e + self.source(e, source, xy_mask)
        b, n, u = e.shape
        flat = self.ln(F.reshape(e, (b * n, u)))
        return F.reshape(flat + self.ff2(F.relu(self.ff1(flat))), (b, n, u))


class Transformer(chainer.Chain):
    def __init__(self, n_layers, n_vocab, n_units):
        super(Transformer, self).__init__()
        with self.init_scope():
            self.embed_x = L.EmbedID(n_vocab, n_units, ignore_label=-1)
            self.embed_y = L.EmbedID(n_vocab, n_units)
            self.encoder = chainer.ChainList(
                *[Block(n_units) for _ in range(n_layers)])
            self.decoder = chainer.ChainList(
                *[Block(n_units) for _ in range(n_layers)])
            self.affine = L.Linear(n_units, n_vocab)
        position = np.arange(32)[:, None] / 100. ** (
            np.arange(n_units) / n_units)
        self.position_encoding_block = np.sin(position).astype('f')[None]

    def make_embedding(self, embed, block):
        emb = embed(block) * self.xp.sqrt(8).astype('f')
        return emb + self.xp.broadcast_to(
            self.position_encoding_block[:, :block.shape[1]], emb.shape)

    def output(self, x_block, y_in):
        def mask(a, b):
            return (a[:, :, None] >= 0) * (b[:, None, :] != PAD)
        n = y_in.shape[1]
        z = self.make_embedding(self.embed_x, x_block)
        for layer in self.encoder:
            z = layer(z, None, mask(x_block, x_block), None)
        h = self.make_embedding(self.embed_y, y_in)
        history = np.arange(n)[None, :] <= np.arange(n)[:, None]
        for layer in self.decoder:
            h = layer(h, z, mask(y_in, y_in) * history[None],
                      mask(y_in, x_block))
        return self.affine(F.reshape(h, (-1, h.shape[2])))

    def __call__(self, x_block, y_in, y_out):
        logits = self.output(x_block, y_in)
        loss = F.softmax_cross_entropy(logits, y_out.reshape(-1),
                                       ignore_label=PAD)
        chainer.report({'loss': loss, 'perp': self.xp.exp(loss.data)}, self)
        return loss

    def translate(self, x_block, max_length=5):
        with chainer.no_backprop_mode(), chainer.using_config('train', False):
            y = self.xp.full((len(x_block), 1), BOS, x_block.dtype)
            for _ in range(max_length):
                logits = self.output(x_block, y)
                ys = F.reshape(logits, y.shape + (-1,)).data[:, -1]
                y = self.xp.concatenate([y, self.xp.argmax(
                    ys, axis=1)[:, None].astype(y.dtype)], axis=1)
        return y[:, 1:]


class VaswaniRule(chainer.training.extension.Extension):
    def __init__(self, attr, d, warmup_steps=10):
        self._attr, self._d, self._warmup, self._t = attr, d, warmup_steps, 0

    def initialize(self, trainer):
        self(trainer)

    def __call__(self, trainer):
        self._t += 1
        optimizer = trainer.updater.get_optimizer('main')
        setattr(optimizer, self._attr, self._d ** -0.5 * min(
            self._t ** -0.5, self._t * self._warmup ** -1.5) * 0.1)

    def serialize(self, serializer):
        self._t = serializer('_t', self._t)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--gpu', '-g', default=-1, type=int)
    parser.add_argument('--out', default='result')
    args = parser.parse_args()
    np.random.seed(0)
    sentences = [np.random.randint(3, 12, np.random.randint(2, 6)).astype('i')
                 for _ in range(24)]
    data = [(s, s[::-1].copy()) for s in sentences]
    train_iter = chainer.iterators.SerialIterator(
        data[:16], 8, shuffle=False)
    test_iter = chainer.iterators.SerialIterator(
        data[16:], 8, repeat=False, shuffle=False)
    model = Transformer(1, 12, 8)
    if args.gpu >= 0:
        chainer.cuda.get_device(args.gpu).use()
        model.to_gpu(args.gpu)
    optimizer = chainer.optimizers.Adam(alpha=5e-3, beta1=0.9, beta2=0.98)
    optimizer.setup(model)
    updater = training.StandardUpdater(
        train_iter, optimizer, converter=seq2seq_pad_concat_convert,
        device=args.gpu)
    trainer = training.Trainer(updater, (3, 'epoch'), out=args.out)
    trainer.extend(extensions.Evaluator(
        test_iter, model, converter=seq2seq_pad_concat_convert,
        device=args.gpu), trigger=(1, 'epoch'))
    trainer.extend(VaswaniRule('alpha', 8), trigger=(1, 'iteration'))

    def translate_one(trainer):
        print('# result :', model.translate(data[20][0][None])[0].tolist())
    trainer.extend(translate_one, trigger=(1, 'epoch'))
    trainer.extend(extensions.LogReport(trigger=(1, 'epoch')))
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'main/perp', 'validation/main/loss']))
    trainer.run()
    chainer.serializers.save_npz(args.out + '/model.npz', model)


if __name__ == '__main__':
    main()
