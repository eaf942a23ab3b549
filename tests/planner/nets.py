"""A model to measure, its batch, and what it must keep."""
import chainer_fp8pipe  # noqa: F401, before chainer

import chainer
import chainer.functions as F
import chainer.links as L
import numpy


class Net(chainer.Chain):
    """With running averages and random numbers in forward."""

    def __init__(self, reads=False):
        super().__init__(fc1=L.Linear(6, 8), bn=L.BatchNormalization(8),
                         fc2=L.Linear(8, 3))
        self.reads = reads

    def forward(self, x, t):
        h = F.relu(self.bn(self.fc1(x)))
        if self.reads and float(h.array.sum()) < 0:
            h = -h
        loss = F.softmax_cross_entropy(self.fc2(F.dropout(h)), t)
        chainer.report({'loss': loss}, self)
        return loss


def batch(samples=8):
    generator = numpy.random.RandomState(0)
    return (generator.rand(samples, 6).astype('f'),
            generator.randint(0, 3, samples).astype('i'))


def content(model):
    """All values of a model, and what else measuring might change."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    found = {name: numpy.array(value)
             for name, value in serializer.target.items()}
    found.update({f'grad {name}': p.grad
                  for name, p in model.namedparams()})
    return found
