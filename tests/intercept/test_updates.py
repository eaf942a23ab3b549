"""Listeners are told of updates, of looks at models and of trainings' ends."""
import contextlib

from chainer_fp8pipe.intercept.updates import common, listen

import chainer
import chainer.links as L
import numpy
from chainer.training import Trainer
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater

PLACES = ((chainer.GradientMethod, 'update'), (Evaluator, '__call__'),
          (Evaluator, 'evaluate'), (Trainer, 'run'),
          *((chainer.serializers, f'save_{kind}') for kind in ('npz', 'hdf5')))


class Listener:
    """Writes down what it is told."""

    def __init__(self, told, name):
        self.told, self.name = told, name

    def updated(self, optimizer):
        self.told.append((self.name, 'updated', optimizer))

    @contextlib.contextmanager
    def common(self):
        self.told.append((self.name, 'begins'))
        yield
        self.told.append((self.name, 'ends'))

    def ended(self, models):
        self.told.append((self.name, 'ended', *models))


def training(out):
    model = L.Classifier(L.Linear(2, 3))
    optimizer = chainer.optimizers.SGD().setup(model)
    data = [(numpy.ones(2, 'f'), numpy.int32(1))] * 4
    return Trainer(StandardUpdater(chainer.iterators.SerialIterator(data, 2),
                                   optimizer), (1, 'iteration'), out), (
        Evaluator(chainer.iterators.SerialIterator(data, 2, repeat=False),
                  model)), optimizer


def test_listeners_are_told_in_the_order_in_which_they_came(tmp_path):
    told = []
    listeners = [Listener(told, name) for name in 'ba']
    ends = [listen(one) for one in listeners]
    trainer, evaluator, optimizer = training(str(tmp_path))
    block = [('b', 'begins'), ('a', 'begins'), ('a', 'ends'), ('b', 'ends')]
    trainer.run()
    assert told == [('b', 'updated', optimizer), ('a', 'updated', optimizer),
                    ('b', 'ended', optimizer.target),
                    ('a', 'ended', optimizer.target)]
    told.clear()
    chainer.serializers.save_npz(tmp_path / 'model.npz', optimizer.target)
    with common():
        assert told == [*block, *block[:2]]
    evaluator()     # which calls evaluate()
    assert told[8:] == [*block[:2], *block, *block[2:]]
    for end in ends:
        end()
    told.clear()
    trainer.updater.update()
    assert not told


def test_chainers_functions_are_its_own_without_a_listener():
    own = [getattr(*place) for place in PLACES]
    one = Listener([], 'one')
    listen(one)
    assert not any(getattr(*place) is before for place, before
                   in zip(PLACES, own, strict=True))
    del one
    assert [getattr(*place) for place in PLACES] == own
