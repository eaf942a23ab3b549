"""GoogLeNet with its two auxiliary classifiers."""
import chainer
import chainer.functions as F
import chainer.links as L

from .layers import outsize, response_normalisation

_POOL = {'ksize': 3, 'stride': 2}
# Of each module: outputs of 1 x 1, of the reduction before 3 x 3 and of it,
# of the reduction before 5 x 5 and of it, and of the projection after pooling.
_MODULES = {
    '3a': (192, 64, 96, 128, 16, 32, 32),
    '3b': (256, 128, 128, 192, 32, 96, 64),
    '4a': (480, 192, 96, 208, 16, 48, 64),
    '4b': (512, 160, 112, 224, 24, 64, 64),
    '4c': (512, 128, 128, 256, 24, 64, 64),
    '4d': (512, 112, 144, 288, 32, 64, 64),
    '4e': (528, 256, 160, 320, 32, 128, 128),
    '5a': (832, 256, 160, 320, 32, 128, 128),
    '5b': (832, 384, 192, 384, 48, 128, 128),
}


class GoogLeNet(chainer.Chain):
    """Szegedy et al., *Going Deeper with Convolutions* (2015).

    In training it returns three arrays of scores: its own and those of the
    auxiliary classifiers, whose losses count 0.3 each.

    Args:
        classes: Number of scores.
        insize: Height and width of the images, 79 at least; the auxiliary
            classifiers depend on it.

    Raises:
        ValueError: Nothing is left of so small an image.
    """

    insize = 224

    def __init__(self, classes=1000, insize=insize):
        super().__init__()
        side = outsize(insize, (7, 2, 3, False), *3 * [(3, 2, 0, True)],
                       (5, 3, 0, False))
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, 2, 3)
            self.conv2_reduce = L.Convolution2D(64, 64, 1)
            self.conv2 = L.Convolution2D(64, 192, 3, pad=1)
            for name, sizes in _MODULES.items():
                setattr(self, f'inception{name}', L.Inception(*sizes))
            self.auxiliary1 = Auxiliary(512, side, classes)
            self.auxiliary2 = Auxiliary(528, side, classes)
            self.fc = L.Linear(1024, classes)

    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.conv1(x)), **_POOL)
        h = F.relu(self.conv2_reduce(response_normalisation(h)))
        h = response_normalisation(F.relu(self.conv2(h)))
        h = self.inception3a(F.max_pooling_2d(h, **_POOL))
        h = F.max_pooling_2d(self.inception3b(h), **_POOL)
        first = h = self.inception4a(h)
        h = self.inception4c(self.inception4b(h))
        second = h = self.inception4d(h)
        h = F.max_pooling_2d(self.inception4e(h), **_POOL)
        h = F.average(self.inception5b(self.inception5a(h)), axis=(2, 3))
        y = self.fc(F.dropout(h, 0.4))
        if not chainer.config.train:
            return y
        return y, self.auxiliary1(first), self.auxiliary2(second)


class Auxiliary(chainer.Chain):
    """A classifier on the way, so that gradients reach the first layers.

    Args:
        channels: Of the input.
        side: Height and width of what is left of it after pooling.
        classes: Number of scores.
    """

    def __init__(self, channels, side, classes):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(channels, 128, 1)
            self.fc1 = L.Linear(128 * side ** 2, 1024)
            self.fc2 = L.Linear(1024, classes)

    def forward(self, x):
        h = F.relu(self.conv(F.average_pooling_2d(x, 5, 3)))
        return self.fc2(F.dropout(F.relu(self.fc1(h)), 0.7))
