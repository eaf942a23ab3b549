"""Groups of threads, and what batch normalisation is by its definition."""
import threading

import chainer
import numpy as np


class Threads:
    """A group like ``chainer_fp8pipe.mpi.grid.Group``, without MPI.

    Attributes:
        sizes: Of all messages of all ranks.
    """

    def __init__(self, size):
        self.size = size
        self.sizes = []
        self._rank = threading.local()
        self._rows = [None] * size
        self._barrier = threading.Barrier(size, timeout=300)

    @property
    def rank(self):
        return self._rank.value

    def gather(self, thing):
        self.sizes.append(np.size(thing))
        self._rows[self.rank] = np.copy(thing)
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows

    def __deepcopy__(self, memo):
        return self

    def run(self, body):
        """What ``body(rank)`` returns, or raises, in a thread per rank."""
        found = [None] * self.size

        def work(rank):
            self._rank.value = rank
            try:
                with chainer.using_config('train', True):
                    found[rank] = body(rank)
            except Exception as error:
                found[rank] = error
        threads = [threading.Thread(target=work, args=(rank,))
                   for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def results(threads, body):
    """As ``threads.run``, but an error is raised here."""
    found = threads.run(body)
    for item in found:
        if isinstance(item, Exception):
            raise item
    return found


def reference(x, gamma, beta, gy, axis, eps=2e-5):
    """Batch normalisation by its definition (Ioffe and Szegedy), float64."""
    x, gy = x.astype(float), gy.astype(float)
    shape = [1 if number in axis else length
             for number, length in enumerate(x.shape)]
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    std = np.sqrt(var + eps)
    hat = (x - mean) / std
    g = gy * gamma.reshape(shape)
    gx = (g - g.mean(axis, keepdims=True)
          - hat * (g * hat).mean(axis, keepdims=True)) / std
    count = x.size // max(gamma.size, 1)
    return {'y': hat * gamma.reshape(shape) + beta.reshape(shape), 'gx': gx,
            'terms': np.abs(g / std).max(),
            'ggamma': (gy * hat).sum(axis), 'gbeta': gy.sum(axis),
            'mean': mean.reshape(gamma.shape),
            'unbiased': (var * count / max(count - 1, 1)
                         ).reshape(gamma.shape)}


def assert_close(found, wanted, tolerance=1e-5, largest=None):
    """To so much of the largest value.

    ``largest`` is given where larger terms may cancel: the gradient of x is
    the difference of some, and nearly 0 for two elements, whatever they are.
    """
    wanted = np.asarray(wanted, float)
    if largest is None:
        largest = np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(np.asarray(found, float), wanted,
                               rtol=tolerance, atol=tolerance * largest)


def parts(sizes):
    """Slices of so many samples, one after the other."""
    ends = np.cumsum(sizes)
    return [slice(end - size, end)
            for end, size in zip(ends, sizes, strict=True)]
