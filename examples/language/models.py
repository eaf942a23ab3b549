"""Two language models, written as for one process.

Nothing in them knows of ranks: they are chains of ordinary links, and
``model(x, t)`` is the mean loss of predicting each token from those before.
"""
import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.initializers import Normal


class Decoder(chainer.Chain):
    """A transformer that sees the past alone, normalised before each part.

    The tokens that go in and those that come out share their vectors, which
    are longer on the way in (Vaswani et al. 2017, section 3.4).

    Args:
        vocabulary: Number of tokens.
        length: Tokens that it sees at most.
        units: Width of all layers.
        layers: Blocks of attention and dense layers.
        heads: Of each attention; ``units`` is a multiple.
        dropout: Share of the units that training leaves out.
    """

    def __init__(self, vocabulary, length, units=512, layers=8, heads=8,
                 dropout=0.0):
        super().__init__()
        self.scale = units ** 0.5
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units, initialW=Normal(0.02))
            self.place = L.EmbedID(length, units, initialW=Normal(0.02))
            self.blocks = chainer.ChainList(*[
                Block(units, heads, dropout) for _ in range(layers)])
            self.norm = L.LayerNormalization(units)

    def forward(self, x, t):
        loss, accuracy = loss_and_accuracy(self.logits(x), t)
        chainer.report({'loss': loss, 'accuracy': accuracy}, self)
        return loss

    def logits(self, x):
        """Of the next token, at each place: (batch, length, vocabulary)."""
        places = self.xp.arange(x.shape[1], dtype=numpy.int32)
        h = self.embed(x) * self.scale + self.place(places)
        for block in self.blocks:
            h = block(h)
        h = everywhere(self.norm, h)
        return F.linear(h, self.embed.W, n_batch_axes=2)


class Block(chainer.Chain):
    """Attention, then two dense layers; each adds to what goes in."""

    def __init__(self, units, heads, dropout):
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.norm1 = L.LayerNormalization(units)
            self.attention = Attention(units, heads)
            self.norm2 = L.LayerNormalization(units)
            self.fc1 = dense(units, 4 * units)
            self.fc2 = dense(4 * units, units)

    def forward(self, x):
        h = self.attention(everywhere(self.norm1, x))
        x = x + dropout(h, self.dropout)
        h = everywhere(self.norm2, x)
        h = F.relu(self.fc1(h, n_batch_axes=2))
        h = self.fc2(h, n_batch_axes=2)
        return x + dropout(h, self.dropout)


class Attention(chainer.Chain):
    """Each place takes from those before it what resembles its question."""

    def __init__(self, units, heads):
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.inputs = dense(units, 3 * units)
            self.outputs = dense(units, units)

    def forward(self, x):
        batch, length, units = x.shape
        h = F.reshape(self.inputs(x, n_batch_axes=2), (
            batch, length, 3 * self.heads, units // self.heads))
        query, key, value = F.split_axis(
            F.transpose(h, (0, 2, 1, 3)), 3, axis=1)
        scores = F.matmul(query, key, transb=True) * (
            units // self.heads) ** -0.5
        # Added to the scores: what comes later counts for nothing.
        future = self.xp.triu(
            self.xp.full((length, length), -1e9, x.dtype), 1)
        h = F.matmul(F.softmax(scores + future, axis=3), value)
        h = F.reshape(F.transpose(h, (0, 2, 1, 3)), x.shape)
        return self.outputs(h, n_batch_axes=2)


class Recurrent(chainer.Chain):
    """Layers of LSTM, each of which adds to what goes in.

    Args:
        vocabulary: Number of tokens.
        length: Tokens that it sees at most, though it could see more.
        units: Width of all layers.
        layers: How many there are.
        heads: Of no use here.
        dropout: Share of the units that training leaves out.
    """

    def __init__(self, vocabulary, length, units=512, layers=8, heads=None,
                 dropout=0.0):
        super().__init__()
        self.scale = units ** 0.5
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units, initialW=Normal(0.02))
            self.layers = chainer.ChainList(*[
                LSTM(units, dropout) for _ in range(layers)])
            self.norm = L.LayerNormalization(units)

    def forward(self, x, t):
        loss, accuracy = loss_and_accuracy(self.logits(x), t)
        chainer.report({'loss': loss, 'accuracy': accuracy}, self)
        return loss

    def logits(self, x):
        """Of the next token, at each place: (batch, length, vocabulary)."""
        h = self.embed(x) * self.scale
        for layer in self.layers:
            h = layer(h)
        h = everywhere(self.norm, h)
        return F.linear(h, self.embed.W, n_batch_axes=2)


class LSTM(chainer.Chain):
    """One layer, over all places of a text; it starts without a memory."""

    def __init__(self, units, dropout):
        super().__init__()
        self.dropout = dropout
        # Of the four gates of each unit, the third forgets; not at first.
        bias = numpy.tile(numpy.array([0, 0, 1, 0], numpy.float32), units)
        with self.init_scope():
            self.norm = L.LayerNormalization(units)
            self.upward = L.Linear(units, 4 * units, initial_bias=bias)
            self.lateral = L.Linear(units, 4 * units, nobias=True)

    def forward(self, x):
        batch, length, units = x.shape
        h = self.upward(everywhere(self.norm, x), n_batch_axes=2)
        gates = F.separate(h, axis=1)
        cell = self.xp.zeros((batch, units), x.dtype)
        cell, h = F.lstm(cell, gates[0])
        states = [h]
        for gate in gates[1:]:
            cell, h = F.lstm(cell, gate + self.lateral(h))
            states.append(h)
        return x + dropout(F.stack(states, axis=1), self.dropout)


def dense(inputs, outputs):
    """A dense layer with the initial values of GPT-2."""
    return L.Linear(inputs, outputs, initialW=Normal(0.02))


def everywhere(link, x):
    """What a link makes of each place of each text."""
    h = link(F.reshape(x, (-1, x.shape[-1])))
    return F.reshape(h, (*x.shape[:-1], -1))


def dropout(x, ratio):
    """Chainer's, which would draw numbers even if it left nothing out."""
    return F.dropout(x, ratio) if ratio else x


def loss_and_accuracy(logits, t):
    """Means over all tokens; the loss is the cross-entropy in nats."""
    logits = F.reshape(logits, (-1, logits.shape[-1]))
    t = t.reshape(-1)
    return F.softmax_cross_entropy(logits, t), F.accuracy(logits, t)


#: What ``--model`` may be.
MODELS = {'decoder': Decoder, 'lstm': Recurrent}
