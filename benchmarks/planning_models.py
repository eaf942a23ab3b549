"""The models of the planning benchmark: what people train, in small."""
from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import chainer_fp8pipe  # noqa: F401, before chainer

import chainer
import chainer.functions as F
import chainer.links as L
from training_networks import Mlp

from tests.models import MODELS
from tests.models.encoder import Encoder
from tests.models.inputs import arrays, floats, integers, padded, some


def _language():
    """The models of ``examples/language``; its file is called models, too."""
    path = pathlib.Path(__file__).resolve().parent.parent.joinpath(
        'examples', 'language', 'models.py')
    spec = importlib.util.spec_from_file_location('language_models', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Net(NamedTuple):
    """A model, its batches, and the samples that a rank takes at a time."""

    make: Callable[[], chainer.Chain]
    batch: Callable
    samples: int
    optimizer: Callable[[], chainer.Optimizer]


class Convolutions(chainer.Chain):
    """A small network for images of 32 x 32 pixels, as for CIFAR."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 32, 3, pad=1)
            self.conv2 = L.Convolution2D(32, 64, 3, pad=1)
            self.conv3 = L.Convolution2D(64, 128, 3, pad=1)
            self.fc1 = L.Linear(128 * 16, 512)
            self.fc2 = L.Linear(512, 10)

    def forward(self, x, t):
        h = x
        for layer in self.conv1, self.conv2, self.conv3:
            h = F.max_pooling_2d(F.relu(layer(h)), 2)
        return F.softmax_cross_entropy(self.fc2(F.relu(self.fc1(h))), t)


class Recurrent(chainer.Chain):
    """Three layers of LSTM over sequences of 24 tokens."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(2000, 256)
            self.lstm = L.NStepLSTM(3, 256, 256, 0.0)
            self.out = L.Linear(256, 2000)

    def forward(self, x, t):
        _, _, ys = self.lstm(None, None, F.separate(self.embed(x)))
        return F.softmax_cross_entropy(self.out(F.concat(ys, axis=0)),
                                       t.ravel())


class Perceptron(chainer.Chain):
    """Linear layers with ReLU between them, and the loss."""

    def __init__(self, *widths):
        super().__init__()
        with self.init_scope():
            self.net = Mlp(widths)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.net(x), t)


def _momentum():
    return chainer.optimizers.MomentumSGD(1e-4)


def _adam():
    return chainer.optimizers.Adam(1e-5)


NETS = {
    'mlp': Net(lambda: Perceptron(1024, 2048, 1024, 10),
               arrays(floats(1024), integers(10)), 32, _momentum),
    'wide': Net(lambda: Perceptron(784, 3072, 3072, 3072, 10),
                arrays(floats(784), integers(10)), 16, _adam),
    'convolutions': Net(Convolutions, arrays(
        floats(3, 32, 32), integers(10)), 32, _momentum),
    'recurrent': Net(Recurrent, arrays(
        integers(2000, 24), integers(2000, 24)), 16, _adam),
    'encoder': Net(lambda: Encoder(1000, 128, 4, 6, 48, dropout=.1),
                   arrays(padded(1000, 48), some(1000, 48)), 8, _adam),
    'language': Net(lambda: _language().Decoder(
        2000, 64, units=192, layers=4, heads=4),
                    arrays(integers(2000, 64), integers(2000, 64)), 8,
                    _adam),
    'resnet50': Net(MODELS['resnet50'].make, MODELS['resnet50'].batch, 4,
                    _momentum),
}
