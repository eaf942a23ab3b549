"""The networks that come with Chainer, as they are."""
from __future__ import annotations

from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L

from .inputs import Case, arrays, floats, integers


class Trained(chainer.Chain):
    """Cross entropy of one of the layers that a network can return."""

    def __init__(self, network, layer):
        super().__init__()
        with self.init_scope():
            self.network = network
        self.layer = layer

    def forward(self, x, t):
        y = self.network(x, layers=[self.layer])[self.layer]
        loss = F.softmax_cross_entropy(y, t)
        chainer.report({'loss': loss, 'accuracy': F.accuracy(y, t)}, self)
        return loss


class AuxiliaryLosses(chainer.Chain):
    """GoogLeNet with the two classifiers half-way up."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.net = L.GoogLeNet(pretrained_model=None)

    def forward(self, x, t):
        names = ['loss1_fc2', 'loss2_fc2', 'loss3_fc']
        outputs = self.net(x, layers=names)
        losses = [F.softmax_cross_entropy(outputs[name], t) for name in names]
        loss = .3 * (losses[0] + losses[1]) + losses[2]
        chainer.report({
            'loss1': losses[0], 'loss2': losses[1], 'loss3': losses[2],
            'loss': loss, 'accuracy': F.accuracy(outputs['loss3_fc'], t),
        }, self)
        return loss


class ResNet(chainer.Chain):
    """ResNet-50 as the predictor of ``L.Classifier``: it returns a dict."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.base = L.ResNet50Layers(pretrained_model=None)
            self.fc = L.Linear(None, 10)

    def forward(self, x):
        return self.fc(self.base(x, layers=['pool5'])['pool5'])


def _trained(network, layer):
    return Trained(network(pretrained_model=None), layer)


_SMALL = arrays(floats(3, 64, 64), integers(1000))
_LARGE = arrays(floats(3, 224, 224), integers(1000))

CASES = [
    Case('resnet50', partial(_trained, L.ResNet50Layers, 'fc6'), _SMALL,
         samples=4, slow=True),
    Case('resnet101', partial(_trained, L.ResNet101Layers, 'fc6'), _SMALL,
         samples=4, slow=True),
    Case('resnet152', partial(_trained, L.ResNet152Layers, 'fc6'), _SMALL,
         samples=4, slow=True),
    # Its last layer stays as it was initialised: fc is there instead.
    Case('resnet50_features', lambda: L.Classifier(ResNet()),
         arrays(floats(3, 64, 64), integers(10)),
         samples=4, slow=True),
    Case('vgg16', partial(_trained, L.VGG16Layers, 'fc8'), _LARGE,
         samples=2, draws=True, slow=True),
    Case('vgg19', partial(_trained, L.VGG19Layers, 'fc8'), _LARGE,
         samples=2, draws=True, slow=True),
    Case('googlenet', AuxiliaryLosses, _LARGE,
         samples=2, draws=True, slow=True),
]
