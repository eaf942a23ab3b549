"""A network that a CPU trains in seconds."""
import chainer
import chainer.functions as F
import chainer.links as L

_HE = chainer.initializers.HeNormal()


class Small(chainer.Chain):
    """Three convolutions with batch normalisation, and a dense layer.

    Args:
        classes: Number of scores.
        insize: Height and width of the images; any do.
    """

    insize = 32

    def __init__(self, classes=1000, insize=insize):
        super().__init__()
        with self.init_scope():
            for number, (inputs, outputs) in enumerate(
                    ((3, 16), (16, 32), (32, 64))):
                setattr(self, f'conv{number}', L.Convolution2D(
                    inputs, outputs, 3, 2, 1, nobias=True, initialW=_HE))
                setattr(self, f'bn{number}', L.BatchNormalization(outputs))
            self.fc = L.Linear(64, classes)

    def forward(self, x):
        h = x
        for number in range(3):
            h = self[f'conv{number}'](h)
            h = F.relu(self[f'bn{number}'](h))
        return self.fc(F.dropout(F.average(h, axis=(2, 3)), 0.1))
