"""A transformer encoder of any size, for tests and for timings."""
from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import initializers

from .inputs import Case, arrays, padded, some


class Attention(chainer.Chain):
    """Self-attention of several heads."""

    def __init__(self, units, heads):
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.qkv = L.Linear(units, 3 * units)
            self.out = L.Linear(units, units)

    def divided(self, x):
        """(samples, length, units) to (samples * heads, length, rest)."""
        n, length, units = x.shape
        x = F.reshape(x, (n, length, self.heads, units // self.heads))
        return F.reshape(F.transpose(x, (0, 2, 1, 3)),
                         (n * self.heads, length, units // self.heads))

    def forward(self, x, mask):
        """``mask``, (samples, length, length): who may look at whom."""
        n, length, units = x.shape
        q, k, v = (self.divided(part) for part in F.split_axis(
            self.qkv(x, n_batch_axes=2), 3, axis=2))
        scores = F.matmul(q, k, transb=True) * (units // self.heads) ** -.5
        mask = self.xp.repeat(mask, self.heads, axis=0)
        low = self.xp.full(scores.shape, -1e9, scores.dtype)
        h = F.matmul(F.softmax(F.where(mask, scores, low), axis=2), v)
        h = F.transpose(F.reshape(h, (n, self.heads, length, -1)),
                        (0, 2, 1, 3))
        return self.out(F.reshape(h, (n, length, units)), n_batch_axes=2)


class Layer(chainer.Chain):
    """Attention and two linear layers, each normalised before."""

    def __init__(self, units, heads, dropout):
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.ln1 = L.LayerNormalization(units)
            self.attention = Attention(units, heads)
            self.ln2 = L.LayerNormalization(units)
            self.wide = L.Linear(units, 4 * units)
            self.narrow = L.Linear(4 * units, units)

    def forward(self, x, mask):
        h = self.attention(each(self.ln1, x), mask)
        x = x + F.dropout(h, self.dropout)
        h = F.relu(self.wide(each(self.ln2, x), n_batch_axes=2))
        h = self.narrow(h, n_batch_axes=2)
        return x + F.dropout(h, self.dropout)


class Encoder(chainer.Chain):
    """A masked language model whose output layer is its embedding.

    ``forward(tokens, targets)`` is the cross entropy of the targets that
    are not -1; both are int32 (samples, length).  Tokens of -1 are padding.
    """

    def __init__(self, vocabulary, units, heads, layers, length, dropout=.1):
        super().__init__()
        self.dropout = dropout
        normal = initializers.Normal(units ** -.5)
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units, normal,
                                   ignore_label=-1)
            self.position = L.EmbedID(length, units, normal)
            self.layers = chainer.ChainList(*(
                Layer(units, heads, dropout) for _ in range(layers)))
            self.ln = L.LayerNormalization(units)
            self.bias = chainer.Parameter(0., (vocabulary,))

    def forward(self, tokens, targets):
        xp = self.xp
        n, length = tokens.shape
        mask = xp.broadcast_to((tokens >= 0)[:, None], (n, length, length))
        positions = self.position(xp.arange(length, dtype=tokens.dtype))
        h = self.embed(tokens) * self.embed.W.shape[1] ** .5
        h = F.dropout(h + F.broadcast_to(positions, h.shape), self.dropout)
        for layer in self.layers:
            h = layer(h, mask)
        h = each(self.ln, h).reshape(n * length, -1)
        y = F.linear(h, self.embed.W, self.bias)
        loss = F.softmax_cross_entropy(y, targets.ravel(), ignore_label=-1)
        chainer.report({'loss': loss, 'perplexity': F.exp(loss)}, self)
        return loss


def each(link, x):
    """A link of matrices applied to the last axis."""
    return F.reshape(link(F.reshape(x, (-1, x.shape[-1]))), x.shape)


CASES = [
    Case('encoder', lambda: Encoder(50, 16, 4, 3, 10),
         arrays(padded(50, 10), some(50, 10, ignored=.7)), draws=True),
]
