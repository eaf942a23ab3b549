"""CaffeNet: AlexNet as Caffe has it, for one device."""
import chainer
import chainer.functions as F
import chainer.links as L

from .layers import outsize, response_normalisation

_HE = chainer.initializers.HeNormal()
_POOL = {'ksize': 3, 'stride': 2}


class CaffeNet(chainer.Chain):
    """Five convolutions, three dense layers, no batch normalisation.

    Krizhevsky et al., *ImageNet Classification with Deep Convolutional
    Neural Networks* (2012), with pooling before the normalisation of
    responses, as in Caffe's ``bvlc_reference_caffenet``.  Three convolutions
    are of two groups of channels.  Initial weights are He's, which suit
    images of deviation 1; the published ones are for pixels of 0 to 255.

    Args:
        classes: Number of scores.
        insize: Height and width of the images, 55 at least; the first dense
            layer depends on it.

    Raises:
        ValueError: Nothing is left of so small an image.
    """

    insize = 227

    def __init__(self, classes=1000, insize=insize):
        super().__init__()
        side = outsize(insize, (11, 4, 0, False), *3 * [(3, 2, 0, True)])
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 96, 11, 4, initialW=_HE)
            self.conv2 = L.Convolution2D(96, 256, 5, pad=2, groups=2,
                                         initialW=_HE)
            self.conv3 = L.Convolution2D(256, 384, 3, pad=1, initialW=_HE)
            self.conv4 = L.Convolution2D(384, 384, 3, pad=1, groups=2,
                                         initialW=_HE)
            self.conv5 = L.Convolution2D(384, 256, 3, pad=1, groups=2,
                                         initialW=_HE)
            self.fc6 = L.Linear(256 * side ** 2, 4096, initialW=_HE)
            self.fc7 = L.Linear(4096, 4096, initialW=_HE)
            self.fc8 = L.Linear(4096, classes)

    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.conv1(x)), **_POOL)
        h = F.relu(self.conv2(response_normalisation(h)))
        h = response_normalisation(F.max_pooling_2d(h, **_POOL))
        h = F.relu(self.conv4(F.relu(self.conv3(h))))
        h = F.max_pooling_2d(F.relu(self.conv5(h)), **_POOL)
        h = F.dropout(F.relu(self.fc6(h)))
        return self.fc8(F.dropout(F.relu(self.fc7(h))))
