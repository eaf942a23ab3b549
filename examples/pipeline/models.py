"""Networks that can be cut into stages between any two layers.

Their layers are ``lazy``: only the rank that owns one has its parameters.
"""
import functools

from chainer_fp8pipe.links import Divisible, lazy

import chainer.functions as F
import chainer.links as L
from chainer.initializers import HeNormal


class FullyConnected(Divisible):
    """Dense layers of one width, the last one with an output per class.

    With 4 layers of width 3072 on CIFAR-10 this is the network with which
    Takisawa, Yazaki and Ishihata compare a pipeline with serial training.

    Args:
        shape: Of an image: channels, height, width.
        depth: Number of dense layers.
        width: Outputs of each but the last.
        classes: Outputs of the last.
        seed: Of the initial values.
    """

    def __init__(self, shape, depth=8, width=512, classes=10, seed=0):
        super().__init__(seed=seed)
        inputs = shape[0] * shape[1] * shape[2]
        for _ in range(depth - 1):
            self.append(lazy(dense, inputs, width))
            self.append(F.relu)
            inputs = width
        self.append(lazy(L.Linear, inputs, classes))


class Convolutional(Divisible):
    """3 x 3 convolutions of one width, a coarse pooling, two dense layers.

    All convolutions but the first cost the same, so that stages can be even.

    Args:
        shape: Of an image: channels, height, width.
        depth: Number of convolutions.
        width: Channels of each.
        classes: Outputs of the last layer.
        seed: Of the initial values.
    """

    def __init__(self, shape, depth=5, width=32, classes=10, seed=0):
        super().__init__(seed=seed)
        channels, height, breadth = shape
        for _ in range(depth):
            self.append(lazy(convolution, channels, width))
            self.append(F.relu)
            channels = width
        self.append(functools.partial(
            F.max_pooling_2d, ksize=(height // 2, breadth // 2)))
        self.append(lazy(dense, 4 * channels, 64))
        self.append(F.relu)
        self.append(functools.partial(F.dropout, ratio=0.2))
        self.append(lazy(L.Linear, 64, classes))


# For layers followed by a ReLU: Chainer's default shrinks the signal.

def dense(inputs, outputs):
    """A dense layer with He's initial values."""
    return L.Linear(inputs, outputs, initialW=HeNormal())


def convolution(inputs, outputs):
    """A convolution that keeps the image's size, with He's initial values."""
    return L.Convolution2D(inputs, outputs, ksize=3, pad=1,
                           initialW=HeNormal())


#: What ``--network`` may be.
NETWORKS = {'mlp': FullyConnected, 'conv': Convolutional}
