"""The networks whose training steps are timed."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chainer_fp8pipe  # noqa: F401, before chainer

import chainer
import chainer.functions as F
import chainer.links as L
import numpy


class Mlp(chainer.ChainList):
    """Linear layers with ReLU between them."""

    def __init__(self, widths):
        super().__init__(*(L.Linear(n_in, n_out) for n_in, n_out
                           in zip(widths[:-1], widths[1:], strict=True)))

    def forward(self, x):
        *hidden, last = self
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


class CaffeNet(chainer.Chain):
    """Krizhevsky et al. 2012 as Caffe has it: 61.0 M parameters."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 96, 11, stride=4)
            self.conv2 = L.Convolution2D(96, 256, 5, pad=2, groups=2)
            self.conv3 = L.Convolution2D(256, 384, 3, pad=1)
            self.conv4 = L.Convolution2D(384, 384, 3, pad=1, groups=2)
            self.conv5 = L.Convolution2D(384, 256, 3, pad=1, groups=2)
            self.fc6 = L.Linear(9216, 4096)
            self.fc7 = L.Linear(4096, 4096)
            self.fc8 = L.Linear(4096, 1000)

    def forward(self, x, t):
        h = F.max_pooling_2d(F.relu(self.conv1(x)), 3, 2)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 3, 2)
        h = F.relu(self.conv4(F.relu(self.conv3(h))))
        h = F.max_pooling_2d(F.relu(self.conv5(h)), 3, 2)
        h = F.relu(self.fc7(F.relu(self.fc6(h))))
        return F.softmax_cross_entropy(self.fc8(h), t)


class GoogLeNet(chainer.Chain):
    """Szegedy et al. 2014 with both auxiliary losses: 13.4 M."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            # Without Caffe's weights it needs no file.
            self.net = L.GoogLeNet(pretrained_model=None)

    def forward(self, x, t):
        heads = ['loss1_fc2', 'loss2_fc2', 'loss3_fc']
        outputs = self.net(x, layers=heads)
        first, second, last = (
            F.softmax_cross_entropy(outputs[head], t) for head in heads)
        return 0.3 * (first + second) + last


class Network(NamedTuple):
    """A network and the size of its images."""

    make: Callable[[], chainer.Link]
    size: int

    def batch(self, rank, images=2):
        """Random images and labels."""
        generator = numpy.random.default_rng(rank)
        return (generator.standard_normal(
            (images, 3, self.size, self.size), numpy.float32),
            generator.integers(0, 1000, images).astype(numpy.int32))


NETWORKS = {'CaffeNet': Network(CaffeNet, 227),
            'GoogLeNet': Network(GoogLeNet, 224)}
