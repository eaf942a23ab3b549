"""Links and functions that are run as one call, in models over two ranks."""
import copy

from chainer_fp8pipe import atomic

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    close,
    give,
    gradients,
    observed,
    own,
    plan_of,
    running,
    serially,
    updater_of,
    values,
)

DRAW = numpy.random.RandomState(0)
BATCH = (DRAW.randn(8, 4).astype('f'),
         numpy.array([0, 0, 1, 1, 1, 2, 2, 1], 'i'))


class Around(chainer.Chain):
    """A layer on the first rank, a link, and a layer on the second."""

    def __init__(self, link):
        super().__init__()
        with self.init_scope():
            self.a, self.k = L.Linear(4, 5), link
            self.b = L.Linear(5, 3)

    def middle(self, h):
        return self.k(h)

    def loss(self, y, t):
        return F.softmax_cross_entropy(y, t)

    def forward(self, x, t):
        loss = self.loss(self.b(self.middle(F.tanh(self.a(x)))), t)
        chainer.report({'total': loss}, self)
        return loss


def cut_before(model, recompute=False):
    """A plan that cuts before the last layer."""
    names = sorted((name for name, _ in model.namedparams()),
                   key=lambda name: (name.startswith('/b/'), name))
    return plan_of([[name] for name in names], '/b/W') | {
        'recompute': [recompute, False]}


def made(model, seed=1):
    """The same values on all ranks."""
    draw = numpy.random.RandomState(seed)
    for _, parameter in sorted(model.namedparams()):
        parameter.array[...] = draw.randn(*parameter.shape)
    return model


def compared(comm, model, batch=BATCH, weight=None, recompute=False):
    """One update over two ranks beside plain Chainer; what is reported."""
    plain = copy.deepcopy(made(model))
    updater = updater_of(comm, model, [batch], cut={
        'plan': cut_before(model, recompute=recompute)})
    give(plain, values(comm, model))
    found = observed(model, updater.update)
    expected = serially(plain, batch, 2, weight)
    close(gradients(comm, model), own(plain))
    numpy.testing.assert_allclose(found['total'], expected, 1e-6)
    return found, updater


class Looking(chainer.Chain):
    """Looks at data, and so is run as one call."""

    def __init__(self, inner=None):
        super().__init__()
        with self.init_scope():
            self.l = inner or L.Linear(5, 5)

    def forward(self, h):
        top = float(abs(h.array).max())
        chainer.report({'top': top}, self)
        return h * 0 if top > 1e9 else self.l(h)


class Returning(chainer.Chain):
    def forward(self, h):
        return h if float(abs(h.array).max()) < 1e9 else h * .5


@on_ranks(2)
def test_a_link_that_returns_its_input_passes_the_gradient_on(comm):
    compared(comm, Around(Returning()))


@on_ranks(2)
def test_what_is_reported_inside_comes_from_the_rank_that_runs_it(comm):
    found, _ = compared(comm, Around(Looking()))
    assert found['top'] > 0


@on_ranks(2)
def test_averages_inside_belong_to_the_rank_that_runs_it(comm):
    model = Around(Looking(L.BatchNormalization(5)))
    plain = copy.deepcopy(made(model))
    updater = updater_of(comm, model, [BATCH], cut={
        'plan': cut_before(model)})
    give(plain, values(comm, model))
    updater.update()
    assert len({path for path, _ in running(comm, model)}) == 1
    owners = comm.allgather(model.partition.is_own(model.k.l, 'avg_mean'))
    assert owners == [True, False]


class Penalty(Around):
    """A parameter is used inside of a call and outside."""

    def middle(self, h):
        @atomic
        def penalty(link, x):
            x = chainer.Variable(x.array)
            slope, = chainer.grad([link(x)], [x],
                                  enable_double_backprop=True)
            return F.mean(slope ** 2)
        self.extra = penalty(self.k, h)
        return self.k(h)

    def loss(self, y, t):
        return F.softmax_cross_entropy(y, t) + .5 * self.extra


@pytest.mark.parametrize('recompute', [False, True])
@on_ranks(2)
def test_a_gradient_from_inside_and_one_from_outside_are_added(
        comm, recompute):
    compared(comm, Penalty(L.Linear(5, 5)), recompute=recompute)


class Choosing(Around):
    """The batch decides which of two links is called."""

    def __init__(self):
        super().__init__(atomic(Looking(L.Linear(5, 5, nobias=True))))
        with self.init_scope():
            self.q = atomic(Looking(L.Linear(5, 5, nobias=True)))

    def forward(self, x, t):
        h = F.tanh(self.a(x))
        h = self.k(h) if (t == 0).sum() > 1 else self.q(h)
        loss = F.softmax_cross_entropy(self.b(h), t)
        chainer.report({'total': loss}, self)
        return loss


@on_ranks(2)
def test_two_links_that_are_run_as_one_call_are_not_confused(comm):
    compared(comm, Choosing())


class Telling(chainer.Chain):
    def forward(self, h):
        top = float(abs(h.array).max())
        return h / top, top


class Told(Around):
    def middle(self, h):
        h, self.top = self.k(h)
        return h

    def loss(self, y, t):
        return F.softmax_cross_entropy(y, t) * self.top


class Keeping(chainer.Chain):
    top = 1.0

    def forward(self, h):
        self.top = float(abs(h.array).max())
        return h / self.top


@pytest.mark.parametrize(('model', 'said'), [
    (Told(Telling()), 'what /k returns beside arrays'),
    (Around(Keeping()), "link /k keeps a number in 'top'")])
@on_ranks(2)
def test_a_number_that_one_rank_knows_is_refused(comm, model, said):
    with pytest.raises(ValueError, match=said):
        updater_of(comm, made(model), [BATCH])


class Counting(Looking):
    """Keeps and returns numbers that do not depend on data."""

    calls = 0

    def forward(self, h):
        self.calls += 1
        return super().forward(h), len(h)


class Counted(Around):
    def middle(self, h):
        h, self.length = self.k(h)
        return h * self.length


@on_ranks(2)
def test_a_number_that_all_ranks_know_may_be_returned(comm):
    compared(comm, Counted(Counting()))


class Loss(chainer.Chain):
    def forward(self, y, t):
        loss = F.softmax_cross_entropy(y, t)
        return loss * 0 if float(loss.array) > 1e9 else loss


class LossInside(Around):
    def __init__(self):
        super().__init__(L.Linear(5, 5))
        with self.init_scope():
            self.measure = Loss()

    def loss(self, y, t):
        return self.measure(y, t)


class TwiceDifferentiable(Around):
    def loss(self, y, t):
        return F.softmax_cross_entropy(y, t, enable_double_backprop=True)


def ignoring():
    labels = BATCH[1].copy()
    labels[:3] = -1
    return BATCH[0], labels


@pytest.mark.parametrize('model', [
    LossInside(), TwiceDifferentiable(L.Linear(5, 5))])
@on_ranks(2)
def test_labels_that_a_loss_ignores_are_counted_wherever_it_is(comm, model):
    compared(comm, model, ignoring(),
             weight=lambda few: float((few[1] >= 0).sum()))


class Noise(chainer.Chain):
    """Draws only where the data are large, as a trace's are not."""

    def forward(self, h):
        return F.dropout(h * 1, .5) if float(abs(h.array).max()) > .2 else h


class Drawing(Around):
    drawn = ()

    def middle(self, h):
        h = self.k(h)
        self.drawn = (*self.drawn, numpy.random.rand())
        return h


@on_ranks(2)
def test_what_is_drawn_inside_moves_nobody_elses_generator(comm):
    model = made(Drawing(Noise()))
    updater_of(comm, model, [BATCH], cut={
        'plan': cut_before(model)}).update()
    mine = comm.allgather(model.drawn)
    assert mine[0] == mine[1]


class Rows(Around):
    def middle(self, h):
        rows = [self.k(F.reshape(row, (1, -1))) for row in h]
        return F.concat(rows, axis=0)


@on_ranks(2)
def test_a_loop_over_a_variable_ends_on_all_ranks(comm):
    _, updater = compared(comm, Rows(L.Linear(5, 5)))
    updater.update()


class LaterLooking(Around):
    """A link that looks at data comes in the second batch only."""

    def __init__(self):
        super().__init__(Looking())
        with self.init_scope():
            self.q = Looking()

    def forward(self, x, t):
        h = F.tanh(self.a(x))
        h = self.k(h) if (t == 0).sum() > 0 else self.q(h)
        return F.softmax_cross_entropy(self.b(h), t)


@on_ranks(2)
def test_a_link_may_look_at_data_in_a_later_batch(comm):
    model = made(LaterLooking())
    first = BATCH[0], numpy.zeros(8, 'i')
    second = BATCH[0], numpy.ones(8, 'i')
    updater = updater_of(comm, model, [first, second], cut={
        'plan': cut_before(model)})
    updater.update()
    plain = LaterLooking()
    give(plain, values(comm, model))
    updater.update()
    serially(plain, second, 2)
    found = gradients(comm, model)
    for path in '/a/W', '/q/l/W', '/b/W':
        close({path: found[path]}, {path: own(plain)[path]})


def looking(self, h):
    """Has to be run as one call."""
    return self.one(h) * (2. if float(h.array.max()) > -9 else 1.)


class Outer(chainer.Chain):
    """A model, and a link in it, whose one method may be ``__call__``."""

    def __init__(self, kind):
        super().__init__()
        with self.init_scope():
            self.a, self.between = L.Linear(4, 4), kind()
            self.b = L.Linear(4, 3)

    def loss(self, x, t):
        return F.softmax_cross_entropy(
            self.b(self.between(F.tanh(self.a(x)))), t)


class Inner(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(4, 4)


class Wrapped(Inner):
    """Has both, one of which calls the other."""

    forward = looking

    def __call__(self, h):
        return super().__call__(h) * 1.5


INNER = {'forward': type('Inner', (Inner,), {'forward': looking}),
         '__call__': type('Inner', (Inner,), {'__call__': looking}),
         'inherited': type('Inner', (type('Inner', (Inner,), {
             '__call__': looking}),), {}), 'both': Wrapped}


@pytest.mark.parametrize('inner', INNER)
@pytest.mark.parametrize('outer', ['forward', '__call__'])
@on_ranks(2)
def test_links_may_have_a_call_of_their_own(comm, outer, inner):
    make = type('Outer', (Outer,), {outer: Outer.loss})
    batch = (numpy.random.RandomState(0).randn(4, 4).astype('f'),
             numpy.arange(4, dtype='i') % 3)
    model, plain = make(INNER[inner]), make(INNER[inner])
    plan = plan_of([['/a/W', '/a/b'], [
        '/between/one/W', '/between/one/b'], ['/b/W', '/b/b']], '/b/W')
    updater = updater_of(comm, model, [batch], cut={'plan': plan})
    give(plain, values(comm, model))
    updater.update()
    serially(plain, batch, 2)
    close(gradients(comm, model), own(plain), 1e-5)
