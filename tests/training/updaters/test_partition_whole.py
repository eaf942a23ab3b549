"""Links and functions that are run as one call, in models over two ranks."""
from chainer_fp8pipe import atomic

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models.judge import (
    Both,
    plan_of,
    running,
    updater_of,
)
from tests.ranks import on_ranks

DRAW = numpy.random.RandomState(0)
BATCH = (DRAW.randn(8, 4).astype('f'),
         numpy.array([0, 0, 1, 1, 1, 2, 2, 1], 'i'))


class Around(chainer.Chain):
    """A layer on the first rank, a link, and a layer on the second."""

    def __init__(self, link, **more):
        super().__init__()
        with self.init_scope():
            self.a, self.k = L.Linear(4, 5), link
            self.b = L.Linear(5, 3)
            for name, other in more.items():
                setattr(self, name, other)

    def middle(self, h):
        return self.k(h)

    def loss(self, y, t):
        return F.softmax_cross_entropy(y, t)

    def forward(self, x, t):
        return self.loss(self.b(self.middle(F.tanh(self.a(x)))), t)


def plan(model, again=False):
    """A plan that cuts before the last layer."""
    names = sorted((name for name, _ in model.namedparams()),
                   key=lambda name: (name.startswith('/b/'), name))
    return plan_of([[name] for name in names], '/b/W') | {
        'recompute': [again, False]}


def made(model, seed=1):
    """The same values on all ranks."""
    draw = numpy.random.RandomState(seed)
    for _, parameter in sorted(model.namedparams()):
        parameter.array[...] = draw.randn(*parameter.shape)
    return model


def both(comm, model, *batches, again=False, **options):
    made(model)
    return Both(comm, model, *(batches or [BATCH]),
                plan=plan(model, again), **options)


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


class Choosing(Around):
    """The batch decides which of two links is called."""

    def forward(self, x, t):
        h = F.tanh(self.a(x))
        h = self.k(h) if (t == 0).sum() > 1 else self.q(h)
        return self.loss(self.b(h), t)


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


class Loss(chainer.Chain):
    def forward(self, y, t):
        loss = F.softmax_cross_entropy(y, t)
        return loss * 0 if float(loss.array) > 1e9 else loss


class LossInside(Around):
    def loss(self, y, t):
        return self.measure(y, t)


class Rows(Around):
    """A loop over a variable, which ends on all ranks."""

    def middle(self, h):
        rows = [self.k(F.reshape(row, (1, -1))) for row in h]
        return F.concat(rows, axis=0)


def square(nobias=True):
    return L.Linear(5, 5, nobias=nobias)


#: Some labels are ignored.
IGNORING = BATCH[0], numpy.where(numpy.arange(8) < 3, -1, BATCH[1])
VALID = {'weight': lambda few: float((few[1] >= 0).sum())}
#: A model, options, and batches.
CASES = {
    'a link that returns its input passes the gradient on': (
        lambda: Around(Returning()), {}),
    **{f'gradients from inside and outside are added, {again}': (
        lambda: Penalty(square(False)), {'again': again})
       for again in (False, True)},
    'two links that are run as one call are not confused': (
        lambda: Choosing(atomic(Looking(square())),
                         q=atomic(Looking(square()))), {}),
    'a number that all ranks know may be returned': (
        lambda: Counted(Counting()), {}),
    'labels are counted in a loss inside': (
        lambda: LossInside(square(False), measure=Loss()), VALID, IGNORING),
    'a loop over a variable ends': (lambda: Rows(square(False)), {},
                                    BATCH, BATCH),
}


@on_ranks(2)
def test_what_is_run_as_one_call_learns_as_in_plain_chainer(comm):
    for make, options, *batches in CASES.values():
        both(comm, make(), *batches, **options).update()


@on_ranks(2)
def test_what_is_reported_and_kept_inside_is_of_the_rank_that_runs_it(comm):
    one = both(comm, Around(Looking(L.BatchNormalization(5))))
    assert one.update()['top'] > 0
    assert len({path for path, _ in running(comm, one.model)}) == 1
    owners = comm.allgather(one.model.partition.placement.is_own(one.model.k.l,
                                                       'avg_mean'))
    assert owners == [True, False]


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
    (Told(Telling()), 'what Telling returns beside values of arrays'),
    (Around(Keeping()), "link /k keeps a number in 'top'")])
@on_ranks(2)
def test_a_number_that_one_rank_knows_is_refused(comm, model, said):
    with pytest.raises(ValueError, match=said):
        updater_of(comm, made(model), [BATCH])


@on_ranks(2)
def test_a_link_that_looks_in_a_later_batch_only_is_to_be_marked(comm):
    model = Choosing(Looking(), q=Looking())
    one = both(comm, model, *((BATCH[0], numpy.full(8, label, 'i'))
                              for label in (0, 1)))
    one.updater.update()
    with pytest.raises(ValueError, match='__float__ needs .*atomic'):
        one.updater.update()
    one.updater.update()
    atomic(model.q)
    one = both(comm, model, *one.batches)
    for _ in range(2):
        one.updater.update()
