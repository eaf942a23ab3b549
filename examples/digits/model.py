"""Small networks for images."""
import chainer
import chainer.functions as F
import chainer.links as L


class ConvNet(chainer.Chain):
    """Three convolutions, the mean over the image, two dense layers.

    Args:
        channels: Of the input: 1 for grey, 3 for colour.
        classes: Number of outputs.
    """

    def __init__(self, channels, classes=10):
        super().__init__()
        # For layers followed by a ReLU: Chainer's default shrinks the signal.
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            self.conv1 = L.Convolution2D(channels, 32, 3, pad=1, initialW=he)
            self.conv2 = L.Convolution2D(32, 64, 3, pad=1, initialW=he)
            self.conv3 = L.Convolution2D(64, 64, 3, pad=1, initialW=he)
            self.fc1 = L.Linear(64, 64, initialW=he)
            self.fc2 = L.Linear(64, classes)

    def forward(self, x):
        h = F.relu(self.conv1(x))
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 2)
        h = F.average(F.relu(self.conv3(h)), axis=(2, 3))
        h = F.dropout(F.relu(self.fc1(h)), 0.2)
        return self.fc2(h)


class Dense(chainer.Chain):
    """Two hidden layers: many gradients, and little to compute.

    Args:
        channels: Of the input.
        classes: Number of outputs.
    """

    def __init__(self, channels, classes=10):
        super().__init__()
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            self.fc1 = L.Linear(None, 512, initialW=he)
            self.fc2 = L.Linear(512, 512, initialW=he)
            self.fc3 = L.Linear(512, classes)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


#: What ``--network`` may be.
NETWORKS = {'conv': ConvNet, 'dense': Dense}
