"""A batch needs a parameter on a stage that has not got it."""
from chainer_fp8pipe.training.extensions import MovingAverage

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    close,
    give,
    own,
    plan_of,
    updater_of,
    values,
)


class Returning(chainer.Chain):
    """Calls its first layers again behind the others, where it is told to."""

    def __init__(self):
        super().__init__()
        self.again = False
        numpy.random.seed(1)
        with self.init_scope():
            self.a, self.b = L.Linear(4, 4), L.Linear(4, 4)
            self.scale = chainer.Parameter(numpy.array(.5, 'f'))
            self.c = L.Linear(4, 3)
            self.late = L.Linear(None, 4)

    def forward(self, x, t):
        h = F.tanh(self.b(F.tanh(self.a(x))))
        if self.again or not chainer.config.train:
            h = F.tanh(self.a(h) * F.broadcast_to(self.scale, h.shape))
        return F.softmax_cross_entropy(self.c(h), t)


PLAN = plan_of([['/a/W', '/a/b'], ['/scale'], ['/b/W', '/b/b'],
                ['/c/W', '/c/b'], ['/late/W', '/late/b']], '/b/W')


def batch_of(seed=0):
    random = numpy.random.RandomState(seed)
    return random.randn(8, 4).astype('f'), numpy.arange(8, dtype='i') % 3


def optimizer_of(rate):
    kind, rate = rate
    return getattr(chainer.optimizers, kind)(rate)


def cut(comm, optimizer):
    model = Returning()
    return model, updater_of(comm, model, [batch_of()], optimizer=optimizer,
                             cut={'plan': PLAN})


@pytest.mark.parametrize('rate', [
    ('MomentumSGD', .1), ('Adam', .01)])
@on_ranks(2)
def test_training_is_that_of_one_process(comm, rate):
    """Also where the optimizer keeps state, and a hook cannot be pickled."""
    seen = []
    model, updater = cut(comm, optimizer_of(rate))
    plain, optimizer = Returning(), optimizer_of(rate)
    give(plain, values(comm, model))
    optimizer.setup(plain)
    for one in model, plain:
        for parameter in one.params():
            if parameter.name in ('W', 'scale'):
                parameter.update_rule.add_hook(
                    lambda rule, _: seen.append(rule.t), 'seen')
    before = dict(model.partition.ranks)
    for again in False, True, True, False, True:
        model.again = plain.again = again
        updater.update()
        plain.cleargrads()
        loss = sum(plain(*[array[few] for array in batch_of()]) for few in (
            slice(0, 4), slice(4, 8))) / 2
        loss.backward()
        optimizer.update()
        close(values(comm, model), own(plain, 'array'), 1e-5)
    assert model.partition.ranks == before
    assert comm.allreduce(len(seen)) > 0


@on_ranks(2)
def test_an_evaluation_with_averages_leaves_none_behind(comm):
    model, updater = cut(comm, chainer.optimizers.SGD(.5))
    average = MovingAverage(model, .9)
    for _ in range(3):
        updater.update()
        average()
    before, homes = values(comm, model), dict(model.partition.ranks)
    with average.weights():
        updater.evaluate(*batch_of())
    assert model.partition.ranks == homes
    close(values(comm, model), before, 0)
    updater.update()                # nothing is where it should not be


class Late(Returning):
    """Has a layer that no batch before the third one calls."""

    def forward(self, x, t):
        return super().forward(self.late(x) if self.again else x, t)


@on_ranks(2)
def test_a_layer_that_gets_its_shape_in_a_later_batch_learns(comm):
    model = Late()
    updater = updater_of(comm, model, [batch_of()], cut={'plan': PLAN},
                         optimizer=chainer.optimizers.SGD(.5))
    updater.update()
    model.again = True
    updater.update()
    first = values(comm, model)
    updater.update()
    plain = Late()
    plain.again = True
    give(plain, first)
    plain.cleargrads()
    plain(*batch_of()).backward()
    chainer.optimizers.SGD(.5).setup(plain).update()
    close(values(comm, model), own(plain, 'array'), 1e-5)
