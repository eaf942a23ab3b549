"""Models for the tests of links."""
from chainer_fp8pipe.links import Divisible, lazy

import chainer.functions as F
import chainer.links as L
import numpy as np


def stages(make, size, **options):
    """The parts of all ranks."""
    return [make().share(rank, size, **options)
            for rank in range(size)]


class Net(Divisible):
    """Five layers; its __init__ takes no arguments, as a user's."""

    def __init__(self):
        super().__init__()
        self.width = 4
        self.append(lazy(L.Linear, 3, self.width))
        self.append(F.relu)
        self.append(lazy(L.Linear, self.width, self.width))
        self.append(self.double)
        self.append(lazy(L.Linear, self.width, 2))

    def double(self, x):
        return 2 * x


def linears(count, width=2):
    """So many layers that can be told apart: layer i is all i."""
    return [L.Linear(width, width, initialW=i) for i in range(count)]


def bits(model):
    """Name to bytes of each parameter; None where it has no shape yet."""
    return {name: None if parameter.array is None
            else parameter.array.tobytes()
            for name, parameter in model.namedparams()}


INPUT = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
