"""Sequences, trees and other loops of Python over links."""
from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .inputs import (
    Case,
    arrays,
    children,
    floats,
    integers,
    keywords,
    net,
    padded,
    some,
)

EOS = 0


class Seq2Seq(chainer.Chain):
    """The decoder attends to each state of the encoder, word by word."""

    def __init__(self, vocabulary=20, units=16):
        super().__init__()
        with self.init_scope():
            self.embed_x = L.EmbedID(vocabulary, units, ignore_label=-1)
            self.embed_y = L.EmbedID(vocabulary, units, ignore_label=-1)
            self.encoder = L.StatelessLSTM(units, units)
            self.decoder = L.StatelessLSTM(units, units)
            self.mix = L.Linear(2 * units, units)
            self.output = L.Linear(units, vocabulary)

    def encode(self, xs):
        c = h = None
        states = []
        for x in xs.T:
            c, h = self.encoder(c, h, self.embed_x(x))
            states.append(h)
        return c, h, F.stack(states, axis=1)

    def attend(self, h, states, padding):
        scores = F.squeeze(F.matmul(states, F.expand_dims(h, 2)), 2)
        weights = F.softmax(scores - padding)
        context = F.squeeze(
            F.matmul(F.expand_dims(weights, 1), states), 1)
        return F.tanh(self.mix(F.concat((h, context))))

    def forward(self, xs, ys):
        padding = np.float32(1e4) * (xs == -1)
        c, h, states = self.encode(xs)
        word = self.xp.full(len(xs), EOS, 'i')
        loss = 0
        for y in ys.T:
            c, h = self.decoder(c, h, self.embed_y(word))
            loss += F.softmax_cross_entropy(
                self.output(self.attend(h, states, padding)), y,
                normalize=False)
            word = y
        chainer.report({'loss': loss}, self)
        return loss


@net(lambda vocabulary=12, units=16: dict(
    embed=L.EmbedID(vocabulary, units), rnn=L.StatefulGRU(units, units),
    out=L.Linear(units, vocabulary)))
def ScheduledSampling(self, sequence):
    """Its own most likely word is, half the time, what it reads next."""
    self.rnn.reset_state()
    steps = sequence.shape[1]
    word = sequence[:, 0]
    loss = 0
    for step in range(1, steps):
        y = self.out(self.rnn(self.embed(word)))
        loss += F.softmax_cross_entropy(y, sequence[:, step])
        word = sequence[:, step]
        if chainer.config.train and np.random.rand() < .5:
            word = y.array.argmax(axis=1).astype('i')
    loss /= steps - 1
    chainer.report({'loss': loss}, self)
    return loss


class TreeLSTM(chainer.Chain):
    """Recursion over a tree per sample, which comes with the batch."""

    def __init__(self, vocabulary=20, units=12, classes=5):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units)
            self.node = L.NaryTreeLSTM(units, units, n_ary=2)
            self.classify = L.Linear(units, classes)

    def traverse(self, words, nodes, at):
        left, right = nodes[at]
        if left < 0:
            x = self.embed(words[at:at + 1])
            return self.node(None, None, None, None, x)
        c0, h0 = self.traverse(words, nodes, left)
        c1, h1 = self.traverse(words, nodes, right)
        return self.node(c0, c1, h0, h1, None)

    def forward(self, words, nodes, label):
        roots = [self.traverse(w, n, len(n) - 1)[1]
                 for w, n in zip(words, nodes, strict=True)]
        y = self.classify(F.concat(roots, axis=0))
        loss = F.softmax_cross_entropy(y, label)
        chainer.report({'loss': loss, 'accuracy': F.accuracy(y, label)},
                       self)
        return loss


class Decoder(chainer.Chain):
    """A transformer that looks back only; the mask is NumPy's."""

    def __init__(self, vocabulary=30, units=16, layers=2, length=8):
        super().__init__()
        self.past = np.tril(np.ones((length, length), '?'))
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units)
            self.position = chainer.Parameter(
                chainer.initializers.Normal(.1), (length, units))
            for name in ('q', 'k', 'v', 'o', 'f1', 'f2'):
                setattr(self, name, chainer.ChainList())
            for _ in range(layers):
                for name in ('q', 'k', 'v', 'o'):
                    self[name].append(L.Linear(units, units))
                self.f1.append(L.Linear(units, 2 * units))
                self.f2.append(L.Linear(2 * units, units))
            self.out = L.Linear(units, vocabulary, nobias=True)

    def forward(self, tokens):
        x, t = tokens[:, :-1], tokens[:, 1:]
        n, length = x.shape
        h = self.embed(x)
        h += F.tile(self.position[:length], (n, 1, 1))
        mask = self.xp.asarray(self.past[:length, :length])
        for q, k, v, o, f1, f2 in zip(self.q, self.k, self.v, self.o,
                                      self.f1, self.f2, strict=True):
            scores = F.einsum('nik,njk->nij', q(h, n_batch_axes=2),
                              k(h, n_batch_axes=2))
            scores = F.where(mask[None], scores / h.shape[2] ** .5,
                             np.float32(-1e9) * self.xp.ones_like(
                                 scores.array))
            mixed = F.einsum('nij,njk->nik', F.softmax(scores, axis=-1),
                             v(h, n_batch_axes=2))
            h += F.dropout(o(mixed, n_batch_axes=2), .1)
            h += f2(F.relu(f1(h, n_batch_axes=2)), n_batch_axes=2)
        y = self.out(h, n_batch_axes=2)
        return F.softmax_cross_entropy(F.reshape(y, (n * length, -1)),
                                       t.reshape(-1))


@net(lambda features=6, units=16, characters=8: dict(
    conv=L.Convolution1D(features, units, 3, pad=1),
    rnn=L.StatefulGRU(units, units), out=L.Linear(units, characters + 1),
    blank=characters))
def Speech(self, frames, text, text_length):
    """Frames to characters: a convolution in time, a GRU, and CTC."""
    self.rnn.reset_state()
    h = F.relu(self.conv(frames))
    ys = [self.out(self.rnn(x)) for x in F.separate(h, axis=2)]
    loss = F.connectionist_temporal_classification(
        ys, text, self.blank, label_length=text_length)
    chainer.report({'loss': loss}, self)
    return loss


@net(lambda vocabulary=20, units=12, tags=5: dict(
    embed=L.EmbedID(vocabulary, units, ignore_label=-1),
    forth=L.Highway(units), out=L.Linear(units, tags)))
def KeywordTagger(self, x, t, mask=None):
    """Batches are dicts; the mask may be left out."""
    n, length = x.shape
    h = self.embed(x).reshape(n * length, -1)
    y = F.log_softmax(self.out(self.forth(h)))
    nll = -F.reshape(F.select_item(y, t.reshape(-1)), (n, length))
    if mask is None:
        return F.mean(nll)
    chainer.report({'tokens': mask.sum()}, self)
    return F.sum(nll * mask) / (mask.sum() + 1e-6)


@net(lambda vocabulary=20, units=12, classes=4: dict(
    embed=L.EmbedID(vocabulary, units),
    rnn=L.NStepLSTM(2, units, units, dropout=.1),
    out=L.Linear(units, classes)))
def SentenceLSTM(self, words, lengths, label):
    """Sentences of different length go to cuDNN's LSTM as a list."""
    xs = [w[:n] for w, n in zip(words, lengths, strict=True)]
    # One embedding of all words is faster than one per sentence.
    ends = np.cumsum([len(x) for x in xs[:-1]])
    exs = F.split_axis(self.embed(F.concat(xs, axis=0)), ends, 0)
    h, c, ys = self.rnn(None, None, exs)
    y = self.out(h[-1])
    loss = F.softmax_cross_entropy(y, label)
    chainer.report({'loss': loss.array,
                    'accuracy': F.accuracy(y, label).array}, self)
    return loss


@net(lambda vocabulary=20, units=8, tags=4: dict(
    embed=L.EmbedID(vocabulary, units),
    rnn=L.NStepBiGRU(1, units, units, dropout=0),
    out=L.Linear(2 * units, tags), crf=L.CRF1d(tags)))
def BidirectionalTagger(self, words, tags, lengths):
    """Tags from both directions, with a conditional random field."""
    xs = [self.embed(w[:n]) for w, n in zip(words, lengths, strict=True)]
    ts = [t[:n] for t, n in zip(tags, lengths, strict=True)]
    _, hs = self.rnn(None, xs)
    return self.crf([self.out(h) for h in hs], ts, transpose=True)


@net(lambda vocabulary=20, units=16, every=3: dict(
    every=every, embed=L.EmbedID(vocabulary, units), lstm=L.LSTM(units, units),
    out=L.Linear(units, vocabulary)))
def TruncatedLM(self, tokens):
    """The past is cut off every few words, within the one forward."""
    self.lstm.reset_state()
    loss = 0
    for step in range(tokens.shape[1] - 1):
        if step % self.every == 0 and step:
            self.lstm.c.unchain()
            self.lstm.h.unchain()
        y = self.out(self.lstm(self.embed(tokens[:, step])))
        loss += F.softmax_cross_entropy(y, tokens[:, step + 1])
    chainer.report({'loss': loss}, self)
    return loss / (tokens.shape[1] - 1)


class StatefulLM(chainer.Chain):
    """The next batch goes on where this one ends."""

    def __init__(self, vocabulary=20, units=16):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units)
            self.l1 = L.LSTM(units, units)
            self.l2 = L.LSTM(units, units)
            self.out = L.Linear(units, vocabulary)

    def reset_state(self):
        self.l1.reset_state()
        self.l2.reset_state()

    def forward(self, x, t):
        for lstm in (self.l1, self.l2):
            if lstm.h is not None:
                lstm.h.unchain_backward()
                lstm.c.unchain_backward()
        loss = 0
        for word, target in zip(x.T, t.T, strict=True):
            h = self.l2(self.l1(self.embed(word)))
            loss += F.softmax_cross_entropy(self.out(h), target)
        chainer.report({'loss': loss / x.shape[1]}, self)
        return loss / x.shape[1]


@net(lambda units=12, layers=3: dict(
    cells=L.StatelessLSTM(None, units).repeat(layers, mode='init'),
    out=L.Linear(units, 1)))
def StackedLSTM(self, series, target):
    """Cells in a list, dropout between them, states in Python's lists."""
    states = [(None, None)] * len(self.cells)
    for x in np.moveaxis(series, 1, 0):
        h = x
        for i, cell in enumerate(self.cells):
            states[i] = cell(*states[i], h)
            h = F.dropout(states[i][1], ratio=.2)
    loss = F.mean_squared_error(self.out(h)[:, 0], target)
    chainer.report({'loss': loss, 'rmse': F.sqrt(loss)}, self)
    return loss


@net(lambda n_in=5, units=8: dict(
    peephole=L.StatefulPeepholeLSTM(n_in, units),
    zoneout=L.StatefulZoneoutLSTM(units, units, .1, .1),
    mgu=L.StatefulMGU(units, units), out=L.Linear(units, 1)))
def Recurrences(self, series, target):
    """The rarer cells, one after the other."""
    for cell in (self.peephole, self.zoneout, self.mgu):
        cell.reset_state()
    for step in range(series.shape[1]):
        h = self.mgu(self.zoneout(self.peephole(series[:, step])))
    return F.mean_squared_error(F.flatten(self.out(h)), target)


@net(lambda vocabulary=20, units=8, tags=5: dict(
    embed=L.EmbedID(vocabulary, units),
    conv=L.Convolution1D(units, 16, 3, pad=1), out=L.Linear(16, tags)))
def TokenTagger(self, words, tags):
    """A window of words; tags of -1 do not count."""
    h = F.transpose(self.embed(words), (0, 2, 1))
    h = F.dropout(F.relu(self.conv(h)), .2).transpose(0, 2, 1)
    y = self.out(h, n_batch_axes=2).reshape(tags.size, -1)
    loss = F.softmax_cross_entropy(y, tags.ravel(), ignore_label=-1)
    chainer.report({
        'loss': loss,
        'accuracy': F.accuracy(y, tags.ravel(), ignore_label=-1)}, self)
    return loss


class SkipGram(chainer.Chain):
    """word2vec with negative samples, drawn anew at each call."""

    def __init__(self, vocabulary=30, units=8):
        super().__init__()
        counts = [vocabulary - i for i in range(vocabulary)]
        with self.init_scope():
            self.embed = L.EmbedID(
                vocabulary, units, initialW=chainer.initializers.Normal(.3))
            self.loss_func = L.NegativeSampling(units, counts, 4)
        self.loss_func.W.array[...] = np.random.normal(
            0, .1, self.loss_func.W.shape)

    def forward(self, centre, context):
        n, around = context.shape
        e = self.embed(context).reshape(n * around, -1)
        x = self.xp.broadcast_to(centre[:, None], (n, around)).reshape(-1)
        return self.loss_func(e, self.xp.ascontiguousarray(x)) / len(x)


class Huffman(chainer.Chain):
    """A softmax that is a walk through a tree."""

    def __init__(self, vocabulary=16, units=8):
        super().__init__()
        tree = L.BinaryHierarchicalSoftmax.create_huffman_tree(
            {word: vocabulary - word for word in range(vocabulary)})
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units)
            self.out = L.BinaryHierarchicalSoftmax(units, tree)

    def forward(self, context, word):
        h = F.sum(self.embed(context), axis=1) * (1. / context.shape[1])
        return self.out(h, word) / len(word)


@net(lambda vocabulary=20, units=12, hops=3: dict(
    hops=hops, A=L.EmbedID(vocabulary, units, ignore_label=-1),
    C=L.EmbedID(vocabulary, units, ignore_label=-1), H=L.Linear(units, units),
    W=L.Linear(units, vocabulary)))
def MemoryNetwork(self, story, question, answer):
    """Questions about sentences, in several hops over the same memory."""
    m = F.sum(self.A(story), axis=2)
    c = F.sum(self.C(story), axis=2)
    u = F.sum(self.A(question), axis=1)
    for _ in range(self.hops):
        p = F.softmax(F.matmul(m, u[:, :, None])[:, :, 0])
        o = F.matmul(p[:, None], c)[:, 0]
        u = o + self.H(u)
    y = self.W(u)
    chainer.report({'accuracy': F.accuracy(y, answer)}, self)
    return F.softmax_cross_entropy(y, answer)


@net(lambda n_in=5, units=8: dict(
    conv=L.Convolution1D(n_in, 3 * units, 2), out=L.Linear(units, 3)))
def QuasiRecurrent(self, series, label):
    """Gates by one convolution; what is left to loop over has no weights."""
    h = F.pad(F.transpose(series, (0, 2, 1)),
              [(0, 0), (0, 0), (1, 0)], 'constant')
    z, f, o = F.split_axis(self.conv(h), 3, 1)
    z, f, o = F.tanh(z), F.sigmoid(f), F.sigmoid(o)
    c = None
    for t in range(z.shape[2]):
        new = (1 - f[:, :, t]) * z[:, :, t]
        c = new if c is None else f[:, :, t] * c + new
    return F.softmax_cross_entropy(self.out(o[:, :, -1] * c), label)


@net(lambda vocabulary=20, units=8: dict(
    embed=L.EmbedID(vocabulary, units), word=L.NStepGRU(1, units, units, 0.),
    sentence=L.NStepBiLSTM(1, units, units, 0.),
    attention=L.Linear(2 * units, 1), out=L.Linear(2 * units, 3)))
def HierarchicalDocument(self, document, label):
    """Words to sentences to a document; lists of variables between."""
    n, sentences, words = document.shape
    xs = list(F.separate(self.embed(
        document.reshape(n * sentences, words)), axis=0))
    h, _ = self.word(None, xs)
    docs = F.split_axis(h[0], n, axis=0)
    _, _, ys = self.sentence(None, None, list(docs))
    vectors = []
    for y in ys:
        weight = F.softmax(self.attention(y), axis=0)
        vectors.append(F.sum(F.broadcast_to(weight, y.shape) * y, 0))
    return F.softmax_cross_entropy(self.out(F.vstack(vectors)), label)


_PAIRS = arrays(padded(20, 6, low=1), padded(20, 5, low=1))
_SERIES = arrays(floats(6, 5), floats())

CASES = [
    Case('seq2seq', Seq2Seq, _PAIRS),
    Case('scheduled_sampling', ScheduledSampling, arrays(integers(12, 6)),
         draws=True),
    Case('tree_lstm', TreeLSTM,
         arrays(integers(20, 4), children(4), integers(5)), samples=4),
    Case('decoder', Decoder, arrays(integers(30, 9)), draws=True),
    Case('ctc', Speech, arrays(floats(6, 9), integers(8, 3),
                               integers(4, low=1))),
    Case('keyword_tagger', KeywordTagger,
         keywords(x=padded(20, 6), t=integers(5, 6),
                  mask=lambda rng, samples: rng.randint(
                      0, 2, (samples, 6)).astype('f'))),
    Case('keyword_tagger_without_mask', KeywordTagger,
         keywords(t=integers(5, 6), x=padded(20, 6))),
    Case('n_step_lstm', SentenceLSTM,
         arrays(integers(20, 6), integers(7, low=1), integers(4)),
         draws=True),
    Case('n_step_bigru_crf', BidirectionalTagger,
         arrays(integers(20, 6), integers(4, 6), integers(7, low=1))),
    Case('truncated_lm', TruncatedLM, arrays(integers(20, 9))),
    Case('stateful_lm', StatefulLM,
         arrays(integers(20, 5), integers(20, 5)), stateful=True),
    Case('stacked_lstm', StackedLSTM, _SERIES, draws=True),
    Case('recurrences', Recurrences, _SERIES, draws=True),
    Case('token_tagger', TokenTagger,
         arrays(integers(20, 7), some(5, 7)), draws=True),
    Case('skip_gram', SkipGram, arrays(integers(30), integers(30, 4)),
         draws=True),
    Case('huffman', Huffman, arrays(integers(16, 4), integers(16))),
    Case('memory_network', MemoryNetwork,
         arrays(some(20, 4, 5), padded(20, 5), integers(20))),
    Case('quasi_recurrent', QuasiRecurrent,
         arrays(floats(6, 5), integers(3))),
    Case('hierarchical_document', HierarchicalDocument,
         arrays(integers(20, 3, 4), integers(3))),
]
