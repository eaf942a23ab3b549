"""What a model's forward changes: the batch, attributes, the graph."""
import functools
import random

from chainer_fp8pipe import PipelineUpdater, ProcessGrid

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest

from tests.models import judge
from tests.models.judge import (
    Both,
    close,
    gradients,
    observed,
    own,
    running,
    serially,
    updater_of,
)
from tests.ranks import on_ranks

plan_of = functools.partial(
    judge.plan_of, [[f'/{name}/W', f'/{name}/b'] for name in 'abcd'])
PLANS = {
    'two stages': plan_of('/c/W'),
    'again before backward': plan_of('/c/W', again=True),
    'chunks': plan_of('/b/W', '/c/W', '/d/W', schedule='interleaved'),
    'chunks, again': plan_of('/b/W', '/c/W', '/d/W', schedule='interleaved',
                             again=True)}


def batch_of(seed=0, samples=8):
    draw = numpy.random.RandomState(seed)
    return (draw.randn(samples, 4).astype('f'),
            draw.randint(0, 3, samples).astype('i'))


def both(comm, make, *batches, plan='two stages', **options):
    return Both(comm, make, *(batches or [batch_of()]),
                plan=PLANS.get(plan, plan) if isinstance(plan, str) else plan,
                **options)


class Layers(chainer.Chain):
    """Four layers; subclasses do something to what goes in and between."""

    def __init__(self):
        numpy.random.seed(1)
        super().__init__(a=L.Linear(4, 5), b=L.Linear(5, 5), c=L.Linear(5, 5),
                         d=L.Linear(5, 3))

    def forward(self, x, t, one=1, two=1):
        h = F.tanh(self.b(F.tanh(self.a(x)) * one))
        return F.softmax_cross_entropy(self.d(F.tanh(self.c(h)) * two), t)


# --- the batch, and attributes -----------------------------------------------

class Halving(Layers):
    """Writes to what it is given."""

    def forward(self, x, t):
        x /= 2
        return super().forward(x, t)


class Averaging(Layers):
    """Keeps an average of its inputs, which NumPy changes in place."""

    def __init__(self):
        super().__init__()
        self.mean, self.seen = numpy.zeros(4, 'f'), [numpy.zeros(1, 'f')]

    def forward(self, x, t):
        self.mean += .5 * (x.mean(axis=0) - self.mean)
        self.seen[0] += len(x)
        return super().forward(x - self.mean, t) * float(
            self.seen[0][0])


class Behind(Layers):
    """Has a persistent value behind a property, and a link in two others.

    A link's name is one that Python cannot write as UTF-8.
    """

    def __init__(self):
        super().__init__()
        self._kept = numpy.zeros(5, 'f')
        self.register_persistent('kept')
        numpy.random.seed(3)
        shared = L.Linear(5, 5)
        for name in 'first', 'sec\udcffond':
            self.add_link(name, chainer.Chain(shared=shared))

    @property
    def kept(self):
        return self._kept

    def forward(self, x, t):
        self._kept = self._kept + 1
        h = F.tanh(self.first.shared(F.tanh(self.a(x))))
        h = F.tanh(self.c(F.tanh(self.b(h))) * self.kept)
        return F.softmax_cross_entropy(
            self.d(self['sec\udcffond'].shared(h)), t)


class Counting(Layers):
    """Counts what its calls have seen."""

    def __init__(self):
        super().__init__()
        self.samples, self.seen = 0, numpy.zeros((), 'f')

    def forward(self, x, t):
        self.samples += len(x)
        self.seen += len(x)
        return super().forward(x, t, self.samples,
                               float(self.seen) * self.samples)


@on_ranks(2)
def test_what_forward_changes_is_changed_as_in_plain_chainer(comm):
    """Once a micro-batch, however often it runs, and not by the cut."""
    for kind, plan, kept in (
            (Halving, 'again before backward', ()),
            (Averaging, 'two stages', ('mean', 'seen')),
            (Behind, None, ('kept',)),
            (Counting, 'chunks, again', ('samples', 'seen'))):
        one = both(comm, kind, batch_of(), plan=plan)
        for name in kept:
            assert not numpy.any(getattr(one.model, name))
        one.update(2)
        numpy.testing.assert_array_equal(one.batches[0][0], batch_of()[0])
        for name in kept:
            numpy.testing.assert_allclose(getattr(one.model, name),
                                          getattr(one.plain, name))


class Keeping(Layers):
    """Goes on from what NumPy has made of the batch before."""

    def __init__(self):
        super().__init__()
        self.kept = self.both = None

    def forward(self, x, t):
        first = h = F.tanh(self.a(x))
        if self.kept is not None:
            h = h + self.kept
        h = F.tanh(self.b(h))
        if self.both is not None:
            h = h + self.both
        h = F.tanh(self.c(h))
        self.kept = h.array.copy()
        self.both = first.array - 2 * h.array.sum(axis=1, keepdims=True)
        return F.softmax_cross_entropy(self.d(h), t)


@on_ranks(2)
def test_state_may_be_made_by_numpy_on_any_stage(comm):
    """Each micro-batch has its own: there is one plain model for each."""
    found = both(comm, Keeping)
    plain = [Keeping() for _ in range(2)]
    for _ in range(3):
        found.updater.update()
    for one, few in zip(plain, (slice(0, 4), slice(4, 8)), strict=True):
        for _ in range(3):
            one.cleargrads()
            one(*(array[few] for array in batch_of())).backward()
    close(found.gradients(), {
        name: (grad + own(plain[1])[name]) / 2
        for name, grad in own(plain[0]).items()})


# --- random numbers ----------------------------------------------------------

class Drawing(Layers):
    """Draws with a generator of its own what two stages use."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x, t):
        mask = numpy.asarray(self.draw(), 'f')
        return super().forward(x, t, mask, mask)


class Source:
    """Holds a generator, in a slot."""

    __slots__ = 'generator',

    def __init__(self, generator):
        self.generator = generator

    def __call__(self):
        return [self.generator.random() for _ in range(5)]


DRAWS = {
    'RandomState': lambda seed: Source(numpy.random.RandomState(seed)),
    'Generator': lambda seed: Source(numpy.random.default_rng(seed)),
    'Random': lambda seed: Source(random.Random(seed))}


@on_ranks(2)
def test_a_generator_of_a_link_draws_the_same_on_all_ranks(comm):
    for make in DRAWS.values():
        one = both(comm, lambda make=make: Drawing(make(0)), batch_of(
            samples=9), micro_batches=3, tolerance=1e-5)
        one.update(3)
        assert one.model.draw() == pytest.approx(one.plain.draw())
        with pytest.raises(ValueError, match='generator 0 .*needs a seed'):
            both(comm, lambda make=make: Drawing(make(comm.rank)), batch_of())


# --- running averages --------------------------------------------------------

def bare(size):
    """A normalisation without parameters."""
    return L.BatchNormalization(size, decay=.5, use_gamma=False,
                                use_beta=False)


class Normalised(Layers):
    """Normalises what it is given and what it makes."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.enter, self.norm = bare(4), bare(5)

    def forward(self, x, t):
        h = self.norm(F.tanh(self.a(self.enter(x))))
        h = F.tanh(self.c(F.tanh(self.b(h))))
        return F.softmax_cross_entropy(self.d(h), t)


def averages(comm, model):
    """Running averages of the ranks that have them."""
    return {key: value.copy() for key, value in running(comm, model).items()
            if isinstance(value, numpy.ndarray)}


@on_ranks(2)
def test_a_chunk_that_only_calls_a_normalisation_does_not_count(comm):
    """Wherever the rank's other chunk normalises."""
    found = []
    for plan in 'two stages', 'chunks':
        one = both(comm, Normalised, plan=plan)
        for _ in range(3):
            one.updater.update()
        found.append(averages(comm, one.model))
    close(found[1], found[0])
    # Those of the whole batch, not of one micro-batch after the other.
    for name, of_batch, first in ('mean', numpy.mean, 0), (
            'var', functools.partial(numpy.var, ddof=1), .125):
        numpy.testing.assert_allclose(
            found[0]['/enter', f'avg_{name}'],
            of_batch(batch_of()[0], axis=0) * .875 + first, 1e-5)


# --- replicas ----------------------------------------------------------------

class Labelling(Layers):
    """Several labels for each sample."""

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(F.stack([
            self.d(F.tanh(self.c(self.a(x)))) * factor
            for factor in (1, 2)], axis=2), t)
        chainer.report({'high' if x[0, 0] > 0 else 'low': loss}, self)
        return loss


@on_ranks(2)
def test_replicas_count_labels_though_one_ignores_none(comm):
    """And report what only one of them has."""
    x, _ = batch_of(0, 16)
    x[:, 0] = numpy.repeat([1, -1], 8)
    t = numpy.random.RandomState(3).randint(0, 3, (16, 2)).astype('i')
    t[:8, 0] = -1
    mine = slice(8 * comm.rank, 8 * comm.rank + 8)
    grid = ProcessGrid(comm, 1)
    model, plain = Labelling(), Labelling()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.), chainermn.create_communicator(
            'naive', mpi_comm=grid.data)).setup(model)
    updater = updater_of(grid, model, [(x[mine], t[mine])],
                         optimizer=optimizer, micro_batches=2,
                         example=(x[:4], t[:4]))
    for _ in range(2):
        found = observed(model, updater.update)
        losses = [float(plain(x[few], t[few]).array)
                  for few in (slice(0, 8), slice(8, 16))]
        assert found == pytest.approx(
            {'high': losses[0], 'low': losses[1]}, 1e-5)
    serially(plain, (x, t), 1)
    close(gradients(grid.pipeline, model), own(plain))
    grid.free()


# --- parameters that are elsewhere -------------------------------------------

class Returning(Layers):
    """Where it is told to: calls its first layer again, or one more."""

    again = more = False

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.late = L.Linear(None, 4)

    def forward(self, x, t):
        if self.more:
            x = self.late(x)
        h = F.tanh(self.c(F.tanh(self.b(F.tanh(self.a(x))))))
        if self.again or not chainer.config.train:
            h = F.tanh(self.b(h))
        return F.softmax_cross_entropy(self.d(h), t)


@on_ranks(2)
def test_parameters_may_come_later_but_not_from_another_stage(comm):
    """What needs one elsewhere is refused on all ranks; others train on."""
    both = Both(comm, Returning, batch_of(), plan=judge.plan_of(
        [['/late/W', '/late/b'],
         *([f'/{name}/W', f'/{name}/b'] for name in 'abcd')], '/c/W'))
    both.update()
    both.model.again = True
    with pytest.raises(ValueError, match=r'parameter /b/[Wb] on stage 1, '
                       'which has not got it; make the'):
        both.updater.update()
    with pytest.raises(ValueError, match='which has not got it'):
        both.updater.evaluate(*batch_of())
    both.model.again = False
    both.update()
    both.model.more = both.plain.more = True
    both.updater.update()       # gets a shape, and learns
    both.update()


class LooksInEvaluation(chainer.Chain):
    times = 0

    def __init__(self):
        super().__init__(l=L.Linear(4, 4))

    def forward(self, x):
        self.times += 1
        h = self.l(x)
        return h if chainer.config.train or h.array.max() > 0 else -h


class AroundIt(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(3, 4), b=LooksInEvaluation())

    def forward(self, x):
        return F.mean(self.b(self.a(x)) ** 2)


@on_ranks(1)
def test_a_link_that_becomes_one_call_counts_its_micro_batches(comm):
    model, x = AroundIt(), numpy.ones((6, 3), 'f')
    updater = updater_of(comm, model, [(x,)] * 3)
    updater.update()
    assert model.b.times == 1       # a batch
    updater.evaluate(x)
    before = model.b.times
    updater.update()
    updater.update()
    assert model.b.times == before + 2 * 2


class Noted:
    """What no look at a model copies."""

    times, fails = 0, ''


class Fails(chainer.FunctionNode):
    def forward(self, inputs):
        if Noted.fails == 'forward':
            raise ValueError('here')
        return inputs[0].copy(),

    def backward(self, indexes, gradients):
        if Noted.fails == 'backward':
            raise ValueError('here')
        return gradients


class Remembering(chainer.Chain):
    def __init__(self):
        numpy.random.seed(1)
        super().__init__(a=L.Linear(4, 5), b=L.LSTM(5, 5), c=L.LSTM(5, 5),
                         d=L.Linear(5, 1))

    def forward(self, x):
        Noted.times += 1
        h = self.b(Fails().apply((self.a(x),))[0])
        loss = F.mean(self.d(F.tanh(self.c(h))) ** 2)
        chainer.report({'total': loss}, self)
        return loss


@on_ranks(2)
def test_forward_runs_once_for_a_micro_batch(comm):
    """Also where it is first recorded for an evaluation."""
    x = numpy.ones((4, 4), 'f')
    updater = updater_of(comm, Remembering(), [(x,)])
    updater.update()
    for call in (functools.partial(updater.evaluate, x), updater.update) * 2:
        before = Noted.times
        call()
        assert Noted.times == before + 2


@on_ranks(2)
def test_an_update_that_failed_leaves_no_state(comm):
    x = numpy.random.RandomState(0).rand(4, 4).astype('f')

    def losses(fails):
        model = Remembering()
        updater = updater_of(comm, model, [(x,)], optimizer=judge.still)
        found = [observed(model, updater.update)['total'] for _ in range(2)]
        if fails:
            Noted.fails = fails * (comm.rank == 0)
            with pytest.raises(RuntimeError, match='here'):
                updater.update()
            Noted.fails = ''
            updater = PipelineUpdater(
                judge.Batches((x,)), updater.get_optimizer('main'), comm,
                micro_batches=2, converter=judge.as_it_is)
        return found + [observed(model, updater.update)['total']
                        for _ in range(2)]
    expected = losses('')
    assert losses('forward') == losses('backward') == expected
    assert len(set(expected)) == 4
