"""Batches, put together from one function for each of their arrays.

Such a function takes a ``numpy.random.RandomState`` and the number of
samples and gives an array with the samples along its first axis.
"""
import numpy


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
