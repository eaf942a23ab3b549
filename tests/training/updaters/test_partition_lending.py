"""A batch needs a parameter on a stage that has not got it."""
from chainer_fp8pipe.training.extensions import MovingAverage

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    Both,
    close,
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


OPTIMIZERS = {
    'MomentumSGD': lambda: chainer.optimizers.MomentumSGD(.1),
    'Adam': lambda: chainer.optimizers.Adam(.01)}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@on_ranks(2)
def test_training_is_that_of_one_process(comm, optimizer):
    """Also where the optimizer keeps state, and a hook cannot be pickled."""
    seen = []

    def set_up(model):
        made = OPTIMIZERS[optimizer]().setup(model)
        for parameter in model.params():
            if parameter.name in ('W', 'scale'):
                parameter.update_rule.add_hook(
                    lambda rule, _: seen.append(rule.t), 'seen')
        return made
    both = Both(comm, Returning, batch_of(), optimizer=set_up, plan=PLAN,
                tolerance=1e-5)
    before = dict(both.model.partition.ranks)
    for again in False, True, True, False, True:
        both.model.again = both.plain.again = again
        both.update()
    assert both.model.partition.ranks == before
    assert comm.allreduce(len(seen)) > 0


@on_ranks(2)
def test_an_evaluation_with_averages_leaves_none_behind(comm):
    model = Returning()
    updater = updater_of(comm, model, [batch_of()], plan=PLAN,
                         optimizer=chainer.optimizers.SGD(.5))
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
    both = Both(comm, Late, batch_of(), plan=PLAN, optimizer=(
        lambda model: chainer.optimizers.SGD(.5).setup(model)))
    both.updater.update()
    both.model.again = both.plain.again = True
    both.updater.update()
    both.update()
