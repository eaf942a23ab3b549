"""Training a partitioned model for some steps, as serial training goes."""
import json

from chainer_fp8pipe import PipelineUpdater, deferred
from chainer_fp8pipe.pipeline.schedules import bounds

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    Batches,
    Both,
    batch_of,
    close,
    give,
    gradients,
    make,
    observed,
    part,
    plan_of,
    reporting,
    running,
    updater_of,
    values,
)


class Tied(chainer.Chain):
    """Its output layer is its embedding; normalised in the middle."""

    def __init__(self, words=11, units=6):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, units)
            self.body = chainer.Sequential(
                L.Linear(units, units), F.tanh, L.BatchNormalization(units),
                L.Linear(units, units), F.tanh)
            self.bias = chainer.Parameter(0., (words,))

    def forward(self, x, t):
        y = F.linear(self.body(self.embed(x)), self.embed.W, self.bias)
        return F.softmax_cross_entropy(y, t)


def tied(kind=Tied):
    with deferred(0):
        return reporting(kind())


def words(seed, samples=8):
    random = numpy.random.RandomState(seed)
    return tuple(random.randint(0, 11, samples).astype('i')
                 for _ in range(2))


def normal(*shape):
    return numpy.random.RandomState(0).randn(*shape).astype('f'),


# --- where the cut is --------------------------------------------------------

class Scaled(chainer.Chain):
    """A mean over what is computed of repeated numbers."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, stride=2, nobias=True)
            self.gain = chainer.Parameter(
                numpy.linspace(.3, 1.7, 8, dtype='f'))

    def forward(self, x):
        h = self.conv(x)
        gain = F.broadcast_to(F.reshape(self.gain, (1, 8, 1, 1)), h.shape)
        return F.sum(F.mean(h * gain, axis=(2, 3)) ** 3)


@pytest.mark.parametrize('calls_later', range(5))
@on_ranks(2)
def test_repeated_numbers_cross_without_another_rounding(comm, calls_later):
    """Where they lie in memory settles the order of sums over the product."""
    both = Both(comm, Scaled, normal(8, 3, 16, 16), plan=plan_of(
        [['/conv/W'], ['/gain']], '/gain', later=calls_later))
    both.give()
    found = observed(both.model, both.updater.update)
    halves = [both.batches[0][0][start:start + 4].copy() for start in (0, 4)]
    assert found['total'] == sum(
        float((both.plain(half) / 2).array) for half in halves)


class Moving(chainer.Chain):
    """A link of it moves on with every forward pass."""

    def __init__(self, moving):
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(4, 6)
            self.norm = (L.BatchRenormalization(6) if moving == 'norm'
                         else L.LayerNormalization(6))
            self.two, self.three = L.Linear(6, 6), L.Linear(6, 1)
        if moving == 'two':
            self.two.add_hook(chainer.link_hooks.SpectralNormalization())

    def forward(self, x):
        h = F.tanh(self.norm(self.one(x)))
        return F.sum(self.three(F.tanh(self.two(h))))


@pytest.mark.parametrize('moving', ['norm', 'two'])
@on_ranks(2)
def test_all_stages_recompute_but_those_that_move_on(comm, moving):
    def cut(**options):
        numpy.random.seed(0)
        model = Moving(moving)
        return model, updater_of(comm, model, [normal(8, 4)], cut=options)
    model, updater = cut(recompute=True)
    plan = model.plan.as_dict()
    assert list(plan['recompute']) == [
        not any(name.startswith(f'/{moving}/') for name in names)
        for names in model.partition.placement.used.values()]
    assert any(plan['recompute'])
    plain, other = cut(plan={**plan, 'recompute': [False, False]})
    for _ in range(2):
        updater.update()
        other.update()
        close(gradients(comm, model), gradients(comm, plain), 0)
    expected = running(comm, plain)
    for key, value in running(comm, model).items():
        numpy.testing.assert_array_equal(value, expected[key], key)


# --- tied parameters, normalisation, replicas --------------------------------

@on_ranks(2, 3)
def test_copies_of_a_tied_parameter_stay_the_same(comm):
    """With Adam and clipping, whose norm counts them once."""
    # Of 2 samples in a micro-batch the normalisation leaves gradients below
    # it that nearly cancel: against float64, W's are wrong by up to 3e-4,
    # and the bias's by 6e-3, in serial training as well.
    def clipping(model):
        optimizer = chainer.optimizers.Adam(.01).setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.2))
        return optimizer            # gradients are always longer
    both = Both(comm, tied, *(words(seed, 16) for seed in range(4)),
                micro_batches=4, optimizer=clipping, tolerance=1e-5)
    assert both.model.partition.placement.ties == {
        '/embed/W': (0, comm.size - 1)}
    both.update()           # compares copies bit for bit, too
    assert 'is on stages 0 and' in str(both.model)


@on_ranks(2)
def test_a_loss_scale_changes_nothing(comm):
    found = []
    for scale in (None, 1024):
        optimizer, model = chainer.optimizers.SGD(.1), tied()
        updater = updater_of(comm, model, [words(0)], optimizer=optimizer)
        if scale:
            optimizer.set_loss_scale(scale)
        losses = [observed(model, updater.update)['total']
                  for _ in range(3)]
        found.append((losses, values(comm, model)))
    numpy.testing.assert_allclose(found[0][0], found[1][0], 1e-6)
    close(found[1][1], found[0][1], 1e-5)


# --- state between batches ---------------------------------------------------

@on_ranks(2)
def test_truncated_backpropagation_is_that_of_plain_chainer(comm):
    """State of one batch is where the next one begins, until it is reset."""
    batches = [batch_of('stateful_lm', seed) for seed in range(5)]
    both = Both(comm, lambda: make('stateful_lm'), *batches, micro_batches=1,
                optimizer=lambda model: chainer.optimizers.SGD(.1).setup(
                    model), tolerance=2e-5)
    for step in range(5):
        if step == 3:
            for one in (both.model, both.plain):
                one.reset_state()
        both.update(1)
        if step == 1:           # evaluation has a state of its own
            first, second = (observed(
                both.model, lambda: both.updater.evaluate(*batches[4])
            )['total'] for _ in range(2))
            assert first != second


@on_ranks(2)
def test_each_micro_batch_goes_on_from_its_own_state(comm):
    """As with one plain model per micro-batch that share their values."""
    batches = [batch_of('stateful_lm', seed) for seed in range(3)]
    model = make('stateful_lm')
    updater = updater_of(comm, model, batches, micro_batches=2)
    plain = [make('stateful_lm') for _ in range(2)]
    for batch in batches:
        now = values(comm, model)
        losses = []
        for (start, end), one in zip(bounds(8, 2), plain, strict=True):
            give(one, now)
            losses.append(float(one(*part(batch, start, end)).array))
        assert observed(model, updater.update)['total'] == pytest.approx(
            numpy.mean(losses), rel=1e-6)


# --- plans -------------------------------------------------------------------

@on_ranks(2)
def test_a_saved_plan_is_followed_and_can_be_edited(comm, tmp_path):
    model = tied()
    updater_of(comm, model, [words(0)])
    path = str(tmp_path / 'plan.json')
    if comm.rank == 0:
        model.plan.save(path)
        with open(path) as file:
            data = json.load(file)
        data['cuts'] = [{'before': '/body/1/W', 'calls_later': 0}]
        data['recompute'] = [True, False]
        with open(path, 'w') as file:
            json.dump(data, file)
    # Only the first rank reads it.
    both = Both(comm, tied, words(0), cut={
        'plan': path if comm.rank == 0 else None})
    mine = {name for name, _ in both.model.namedparams()}
    assert ('/body/0/W' in mine) == (comm.rank == 0)
    assert ('/body/1/W' in mine) == ('/bias' in mine) == (comm.rank == 1)
    assert '/embed/W' in mine
    assert both.model.plan.recompute == (True, False)
    both.update()


@on_ranks(2)
def test_a_limit_that_is_no_limit_brings_no_recomputation(comm):
    model = tied()
    updater_of(comm, model, [words(0)], cut={'memory': '1 GiB'})
    assert model.plan.recompute == (False, False)
    assert max(model.plan.predicted.memory) < 2 ** 30
    assert 'stage' in str(model)


@on_ranks(2)
def test_a_rank_holds_its_own_part_only(comm):
    with deferred():
        model = chainer.Sequential(
            *(L.Linear(50, 50) for _ in range(6)), F.sum)
    updater_of(comm, model, [(numpy.ones((4, 50), 'f'),)], cut={
        'optimizer': chainer.optimizers.SGD()})
    mine = sum(parameter.array.nbytes for parameter in model.params())
    assert sum(comm.allgather(mine)) == 6 * 50 * 51 * 4
    assert 0 < mine < 6 * 50 * 51 * 4


@pytest.mark.parametrize('recompute', [True, False])
@on_ranks(1, 2)
def test_what_is_recomputed_is_what_the_plan_says(comm, recompute):
    done = []

    class Counted(chainer.FunctionNode):
        def forward(self, inputs):
            done.append(0)
            return inputs[0] * 1,

        def backward(self, indexes, gradients):
            return gradients

    model = chainer.Sequential(
        L.Linear(4, 4), lambda h: F.sum(Counted().apply((h,))[0]))
    updater = updater_of(comm, model, [vectors(4)],
                         cut={'recompute': recompute})
    done.clear()
    updater.update()
    assert comm.allreduce(len(done)) == 2 * (1 + recompute)  # micro-batches
    for other in ({'micro_batches': 4}, {'schedule': 'gpipe'},
                  {'recompute': not recompute}):
        with pytest.raises(ValueError, match='the model was planned for '
                           f'{next(iter(other))}=.*to partition'):
            PipelineUpdater(Batches(vectors(4)), updater.get_optimizer(
                'main'), comm, **other)


# --- what is kept ------------------------------------------------------------

class Iterating(chainer.Chain):
    """Goes through a variable, which ends with an error; catches another."""

    def __init__(self):
        super().__init__(l1=L.Linear(4, 5), l2=L.Linear(5, 1))

    def forward(self, x):
        h = self.l1(x)
        try:
            h = h[len(h)]
        except IndexError:
            h = F.stack([*F.tanh(h)])
        return F.mean(self.l2(h))


def vectors(samples):
    return numpy.ones((samples, 4), 'f'),


@on_ranks(3)
def test_a_model_may_catch_errors(comm):
    Both(comm, Iterating, vectors(8), vectors(6)).update(4)
