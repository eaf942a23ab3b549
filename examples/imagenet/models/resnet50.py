"""ResNet-50, in the form "v1.5" that is commonly trained."""
import chainer
import chainer.functions as F
import chainer.links as L

_HE = chainer.initializers.HeNormal(fan_option='fan_out')
# Blocks of each stage, and channels inside them.
_STAGES = (3, 64), (4, 128), (6, 256), (3, 512)


class ResNet50(chainer.Chain):
    """He et al., *Deep Residual Learning for Image Recognition* (2016).

    "v1.5": a block that halves the image does it in its 3 x 3 convolution,
    not in the first 1 x 1 one, which would never look at three quarters of
    its input.

    Args:
        classes: Number of scores.
        insize: Height and width of the images; any do.
        zero_gamma: Each block starts as the identity, as the gamma of its
            last normalisation is zero (Goyal et al. 2017, section 5.1).
    """

    insize = 224

    def __init__(self, classes=1000, insize=insize, zero_gamma=True):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, 2, 3, nobias=True,
                                         initialW=_HE)
            self.bn1 = L.BatchNormalization(64)
            self.blocks = chainer.ChainList()
            self.fc = L.Linear(2048, classes,
                               initialW=chainer.initializers.Normal(0.01))
        channels = 64
        for number, (blocks, inside) in enumerate(_STAGES):
            for block in range(blocks):
                stride = 2 if number and not block else 1
                self.blocks.append(Bottleneck(channels, inside, stride,
                                              zero_gamma))
                channels = 4 * inside

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.max_pooling_2d(h, 3, 2, 1, cover_all=False)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.average(h, axis=(2, 3)))


class Bottleneck(chainer.Chain):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut.

    Args:
        channels: Of the input.
        inside: Between the convolutions; there are four times as many in
            the output.
        stride: Of the 3 x 3 convolution, and of the shortcut.
        zero_gamma: As in :class:`ResNet50`.
    """

    def __init__(self, channels, inside, stride, zero_gamma):
        super().__init__()
        outside = 4 * inside
        gamma = 0 if zero_gamma else 1
        with self.init_scope():
            self.conv1 = L.Convolution2D(channels, inside, 1, nobias=True,
                                         initialW=_HE)
            self.bn1 = L.BatchNormalization(inside)
            self.conv2 = L.Convolution2D(inside, inside, 3, stride, 1,
                                         nobias=True, initialW=_HE)
            self.bn2 = L.BatchNormalization(inside)
            self.conv3 = L.Convolution2D(inside, outside, 1, nobias=True,
                                         initialW=_HE)
            self.bn3 = L.BatchNormalization(outside, initial_gamma=gamma)
            if channels != outside:
                self.conv4 = L.Convolution2D(channels, outside, 1, stride,
                                             nobias=True, initialW=_HE)
                self.bn4 = L.BatchNormalization(outside)
        self._is_projected = channels != outside

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        shortcut = self.bn4(self.conv4(x)) if self._is_projected else x
        return F.relu(h + shortcut)
