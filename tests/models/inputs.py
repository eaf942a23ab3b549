"""What the collection says of each of its models, and their batches.

A batch is put together from one function for each of its arrays.  Such a
function takes a ``numpy.random.RandomState`` and the number of samples and
gives an array with the samples along its first axis.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import chainer
import numpy

Batch = tuple[numpy.ndarray, ...] | dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Case:
    """A model that was written without a thought of who else runs it.

    ``make()`` gives a chain whose ``chain(*batch)``, or ``chain(**batch)``
    where the batch is a dict, is a scalar loss.  ``batch(rng, samples)``
    gives arrays whose first axis is the samples, all of them.
    """

    name: str
    make: Callable[[], chainer.Chain]
    batch: Callable[[numpy.random.RandomState, int], Batch]
    samples: int = 8            # divisible by 4, or 2 where one takes long
    draws: bool = False         # random numbers in forward while training
    stateful: bool = False      # an update begins where the last one ended
    batch_norm: bool = False    # a sample's result depends on the others
    slow: bool = False          # more than half a second for a step
    reads: bool = False         # forward reads `.array` of what it computed
    reenters: bool = False      # backward within forward, or the reverse
    unused: tuple[str, ...] = ()    # parameters that get no gradient

    def loss(self, model, batch):
        """The model's loss of a batch, whichever of the two kinds it is."""
        return model(**batch) if isinstance(batch, dict) else model(*batch)


def arrays(*parts):
    """A batch that is a tuple."""
    def batch(rng, samples):
        return tuple(part(rng, samples) for part in parts)
    return batch


def keywords(**parts):
    """A batch that is a dict."""
    def batch(rng, samples):
        return {name: part(rng, samples) for name, part in parts.items()}
    return batch


def floats(*shape):
    """float32 of mean 0 and deviation 1."""
    return lambda rng, samples: rng.normal(
        0, 1, (samples, *shape)).astype('f')


def bits(*shape):
    """float32, each of which is 0 or 1."""
    return lambda rng, samples: rng.randint(
        0, 2, (samples, *shape)).astype('f')


def integers(high, *shape, low=0):
    """int32 from ``low`` to ``high - 1``: labels, tokens or lengths."""
    return lambda rng, samples: rng.randint(
        low, high, (samples, *shape)).astype('i')


def some(high, *shape, ignored=.3):
    """int32 below ``high`` of which a share is -1, but no sample's first."""
    def part(rng, samples):
        result = rng.randint(0, high, (samples, *shape)).astype('i')
        gone = rng.uniform(size=result.shape) < ignored
        gone.reshape(samples, -1)[:, 0] = False
        result[gone] = -1
        return result
    return part


def padded(high, length, low=0):
    """int32 tokens in sequences of different length, then -1."""
    def part(rng, samples):
        result = rng.randint(low, high, (samples, length)).astype('i')
        for row, end in zip(result,
                            rng.randint(length // 2, length + 1, samples),
                            strict=True):
            row[end:] = -1
        return result
    return part


def adjacency(nodes):
    """float32 normalised adjacency matrices of undirected graphs."""
    def part(rng, samples):
        edges = rng.uniform(size=(samples, nodes, nodes)) < .3
        edges = edges | edges.transpose(0, 2, 1) | numpy.eye(nodes, dtype='?')
        root = numpy.sqrt(edges.sum(axis=2, dtype='f'))
        return (edges / root[:, :, None] / root[:, None]).astype('f')
    return part


def children(leaves):
    """int32 (samples, 2 * leaves - 1, 2): the two children of each node.

    The first ``leaves`` nodes have none (-1), the last is the root.
    """
    def one(rng):
        result = numpy.full((2 * leaves - 1, 2), -1, 'i')
        roots = list(range(leaves))
        for node in range(leaves, len(result)):
            at = rng.randint(len(roots) - 1)
            result[node] = roots[at:at + 2]
            roots[at:at + 2] = [node]
        return result
    return lambda rng, samples: numpy.stack([one(rng)
                                             for _ in range(samples)])


def net(parts):
    """Decorates ``forward``, to get a function that makes such chains.

    ``parts(...)`` gives their links, parameters and other attributes.
    """
    def decorate(forward):
        kind = type(forward.__name__, (chainer.Chain,), {
            'forward': forward, '__doc__': forward.__doc__,
            '__module__': forward.__module__})

        @functools.wraps(parts)
        def make(*args, **sizes):
            model = kind()
            with model.init_scope():
                for name, part in parts(*args, **sizes).items():
                    setattr(model, name, part)
            return model
        return make
    return decorate
