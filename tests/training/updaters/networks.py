"""Networks and a serial reference for the tests of the pipeline."""
from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.randomness import Place, seed_at

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

CLASSES = 5


class Plain(Divisible):
    """Fully connected."""

    def __init__(self):
        super().__init__(seed=1)
        for width in (8, 12, 12):
            self.append(lazy(L.Linear, width, 12))
            self.append(F.tanh)
        self.append(lazy(L.Linear, 12, CLASSES))


class Skipping(Divisible):
    """With tuples, integers that travel along, and a nested chain."""

    def __init__(self):
        super().__init__(seed=2)
        self.append(lazy(L.Linear, 8, 8))
        self.append(lambda h: (h, F.tanh(h), np.arange(len(h), dtype='i')))
        self.append(lazy(Merge))
        self.append(lambda h, skip, number: (h * skip, number))
        self.append(lambda h, number: h + F.broadcast_to(
            F.cast(number, 'f')[:, None], h.shape))
        self.append(lazy(L.Linear, 8, CLASSES))


class Merge(chainer.Chain):
    def __init__(self):
        super().__init__(inner=L.Linear(8, 8))

    def forward(self, h, skip, number):
        return self.inner(F.relu(self.inner(h))) + skip, h, number


class Noisy(Divisible):
    """With dropout in two forms."""

    def __init__(self):
        super().__init__(seed=3)
        self.append(lazy(L.Linear, 8, 12))
        self.append(F.dropout)
        self.append(F.relu)
        self.append(lazy(L.Linear, 12, 12))
        self.append(lambda h: F.dropout(h, 0.3))
        self.append(lazy(L.Linear, 12, CLASSES))


class Normalised(Divisible):
    """With batch normalisation and convolutions; sizes are found out."""

    def __init__(self):
        super().__init__(seed=4)
        self.append(lambda x: F.reshape(x, (-1, 2, 2, 2)))
        self.append(lazy(L.Convolution2D, None, 4, 2, pad=1,
                         nobias=True))
        self.append(lazy(L.BatchNormalization, 4))
        self.append(F.relu)
        self.append(lazy(L.Linear, None, 12, nobias=True))
        self.append(lazy(L.BatchNormalization, 12, decay=0.5))
        self.append(lazy(L.Linear, 12, CLASSES))


NETWORKS = {network.__name__: network
            for network in (Plain, Skipping, Noisy, Normalised)}


class Tied(chainer.Chain):
    """A model to be partitioned; its last layer is its first one."""

    def __init__(self, normalised=True):
        super().__init__()
        np.random.seed(3)
        with self.init_scope():
            self.first = L.Linear(8, 8)
            self.body = chainer.Sequential(
                L.BatchNormalization(8) if normalised else L.Bias(1, (8,)),
                L.Linear(8, 8), F.tanh)

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(
            self.first(self.body(F.tanh(self.first(x)))), t)
        chainer.report({'loss': loss}, self)
        return loss


def dataset(samples, ignored=(), seed=0):
    """Arrays of inputs and labels; some are to be ignored."""
    random = np.random.RandomState(seed)
    inputs = random.randn(samples, 8).astype('f')
    labels = random.randint(0, CLASSES, samples).astype('i')
    labels[list(ignored)] = -1
    return inputs, labels


def serial_gradients(network, batch, sizes):
    """What is reported, and gradients, as plain Chainer has them.

    The graph is that of the sum over micro-batches of the loss, each weighted
    by how many labels it does not ignore.
    """
    model = network()
    inputs, labels = batch
    layers = [(index, layer) for piece in model.pieces
              for index, layer in piece]
    total = right = start = 0
    valid = max(int((labels >= 0).sum()), 1)
    with chainer.using_config('train', True):
        for size in sizes:
            value = (inputs[start:start + size],)
            for index, layer in layers:
                seed_at(Place(0, 0, index, start))
                value = layer(*value)
                value = value if isinstance(value, tuple) else (value,)
            part = labels[start:start + size]
            loss = F.softmax_cross_entropy(*value, part)
            total += loss * float((part >= 0).sum() / valid)
            right += float(F.accuracy(*value, part).array) * size / len(labels)
            start += size
    model.cleargrads()
    total.backward()
    return {'main/loss': float(total.array),
            'main/accuracy': right}, gradients(model)


def gradients(model):
    """Copies of the gradients, by name."""
    return {name: None if parameter.grad is None else parameter.grad.copy()
            for name, parameter in model.namedparams()}


def close(found, expected, tolerance=1e-6):
    """Each array to a share of its largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=0, err_msg=name,
            atol=tolerance * max(np.abs(value).max(initial=0), 1e-3))


def gathered(comm, found):
    """What all ranks found by name, on all ranks."""
    merged = {}
    for part in comm.allgather(found):
        merged.update(part)
    return merged
