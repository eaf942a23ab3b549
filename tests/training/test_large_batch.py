"""Large batches: rates, LARS, decay of weights, the end of divergence.

Against the papers' equations in float64.
"""
import math
import warnings

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.large_batch import (
    changed,
    is_weight,
    large_batch,
    learning_rate,
)

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tests.ranks import on_ranks

from .trainers import SERIAL, Job
from .updaters.networks import close, dataset

SGD, MOMENTUM = chainer.optimizers.SGD, chainer.optimizers.MomentumSGD


def model_of(**arrays):
    """A chain with these parameters."""
    model = chainer.Chain()
    with model.init_scope():
        for name, array in arrays.items():
            setattr(model, name, chainer.Parameter(numpy.array(array)))
    return model


# --- the learning rate -------------------------------------------------------

#: ImageNet in an hour: 8192 samples, 0.1 for 256, 90 epochs.
GOYAL = {'batch': 8192, 'base_lr': 0.1, 'base_batch': 256, 'warmup_epochs': 5,
         'epochs': 90}


def cosine(epoch, warmup, epochs):
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


@pytest.mark.parametrize(('decay', 'rates'), [
    ('step', {0: 0.1, 2.5: 1.65, 5: 3.2, 29.99: 3.2, 30: 0.32, 59.99: 0.32,
              60: 0.032, 80: 0.0032, 90: 0.0032, 1000: 0.0032}),
    ('polynomial', {5: 3.2, 47.5: 0.8, 81.5: 0.032, 90: 0, 95: 0}),
    ('constant', {89: 3.2}), (cosine, {45: 1.6})])
def test_rates_are_those_of_the_papers(decay, rates):
    for epoch, rate in rates.items():
        assert learning_rate(epoch, **GOYAL, decay=decay) == pytest.approx(
            rate, rel=1e-12, abs=1e-12)


# --- LARS and decay of weights -----------------------------------------------

W = numpy.array([[3, 0], [0, 4]], 'f4')         # of norm 5
G = numpy.array([[0, 6], [8, 0]], 'f4')         # of norm 10


def flat(optimizer, coefficient=None, decay=0.0):
    """The recipe with a rate of 1 for ever."""
    return large_batch(
        optimizer, 1, 1.0, 1, 0, 1, 1, coefficient is not None, 'constant',
        decay, coefficient or 1.0)


def step(hook, gradients, scale=None, **arrays):
    """Changes of the parameters by one update, as float64.

    Args:
        hook: Coefficient of LARS or None, and decay.
        gradients: By the parameter's name; unscaled.
        scale: Of the loss.
        arrays: The parameters.
    """
    model = model_of(**arrays)
    optimizer = flat(SGD(), *hook).setup(model)
    for name, gradient in gradients.items():
        one = getattr(model, name)
        one.grad = (numpy.asarray(gradient, one.dtype)
                    * one.dtype.type(scale or 1))
        one._loss_scale = scale
    optimizer.update()
    return {name: getattr(model, name).array.astype(float)
            - numpy.asarray(array, float) for name, array in arrays.items()}


def paper(weight, gradient, coefficient, decay):
    """Equation 6 with weight decay, and the gradient's part of 7."""
    weight, gradient = weight.astype(float), gradient.astype(float)
    norm = numpy.sqrt((weight ** 2).sum())
    rate = coefficient * norm / (
        numpy.sqrt((gradient ** 2).sum()) + decay * norm)
    return rate * (gradient + decay * weight)


@settings(max_examples=60)
@given(st.integers(0, 2 ** 32 - 1), st.integers(1, 5), st.integers(1, 300),
       st.floats(1e-5, 10), st.floats(0, 1), st.floats(-6, 6),
       st.sampled_from(['f4', 'f8']))
def test_lars_equals_the_papers_equation(
        seed, rows, columns, coefficient, decay, power, dtype):
    generator = numpy.random.default_rng(seed)
    weight = generator.normal(size=(rows, columns)).astype(dtype)
    gradient = (generator.normal(size=weight.shape)
                * 10.0 ** power).astype(dtype)
    expected = paper(weight, gradient, coefficient, decay)
    found = changed(numpy, weight, gradient, coefficient, decay)
    assert found.dtype == dtype
    assert_allclose(found, expected, rtol=2e-5, atol=2e-6 * max(
        abs(expected).max(), 1e-30))


LARGE = numpy.full((300, 300), 300, 'f2')
#: Coefficient and decay, weight, gradient, and the change by one update.
CHANGES = {
    'a weight of zeros can leave zero': ((1e-3,), 0 * W, G, -G),
    'with decay, too': ((1e-3, 1.0), 0 * W, G, -G),
    'a gradient of zeros': ((1e-3,), W, 0 * G, 0 * W),
    'which leaves the decay': ((0.01, 0.5), W, 0 * G, -0.01 * W),
    'norms of float16': ((0.5,), LARGE / 64, LARGE, -0.5 * LARGE / 64)}


@pytest.mark.parametrize('what', CHANGES)
def test_what_norms_may_spoil(what):
    hook, weight, gradient, change = CHANGES[what]
    assert_allclose(step(hook, {'W': gradient}, W=weight)['W'], change,
                    rtol=2e-3 if weight.dtype == 'f2' else 1e-5)


@pytest.mark.parametrize('scale', [None, 1.0, 128.0, 65504.0])
@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_changes_nothing(scale, dtype):
    for hook, change in (((0.5,), -0.5 * 5 / 10 * G),
                         ((None, 0.1), -(G / 65504 + 0.1 * W))):
        found = step(hook, {'W': G / 65504}, scale, W=W.astype(dtype))['W']
        assert_allclose(found, change, rtol=2e-2, atol=2e-3)


def test_weights_are_told_from_the_rest_in_chainers_links():
    model = chainer.Chain(
        linear=L.Linear(3, 2), convolution=L.Convolution2D(1, 2, 3),
        embedding=L.EmbedID(3, 2), lstm=L.LSTM(2, 2),
        batch=L.BatchNormalization(2), again=L.BatchRenormalization(2),
        layer=L.LayerNormalization(2), group=L.GroupNormalization(1, 2),
        slope=L.PReLU(), bias=L.Bias(1, (2, 3)), scale=L.Scale(1, (2,)),
        # Their parameters have several dimensions.
        wide=L.BatchNormalization(axis=0, size=(2, 3)),
        local=L.LocalConvolution2D(1, 2, in_size=4, ksize=3))
    assert (model.wide.gamma.ndim, model.local.b.ndim) == (2, 3)
    assert [name for name, parameter in sorted(model.namedparams())
            if is_weight(parameter)] == [
        '/convolution/W', '/embedding/W', '/linear/W', '/local/W',
        '/lstm/lateral/W', '/lstm/upward/W']


# --- schedules ---------------------------------------------------------------

def rate_at(epoch):
    return learning_rate(epoch, 32, 0.5, 8, 1, 4)


def test_every_update_has_the_rate_of_its_number(tmp_path):
    """Also in an optimizer that goes on."""
    def scheduled():
        return recipe(SGD(7.0), lars=False, weight_decay=0.0).setup(
            model_of(W=numpy.zeros((2, 2), 'f4')))
    optimizer, used = scheduled(), []
    for _ in range(2):
        for _ in range(9):
            weight = optimizer.target.W
            before = weight.array.copy()
            weight.grad = numpy.ones_like(before)
            optimizer.update()
            used.append(float((before - weight.array)[0, 0]))
        chainer.serializers.save_npz(tmp_path / 'state.npz', optimizer)
        optimizer = scheduled()
        chainer.serializers.load_npz(tmp_path / 'state.npz', optimizer)
    assert used == pytest.approx(
        [rate_at(number / 4) for number in range(18)], abs=1e-5)
    assert used[:5] == pytest.approx([0.5, 0.875, 1.25, 1.625, 2.0])
    assert rate_at(4) == 0          # after the last epoch


# --- the whole recipe --------------------------------------------------------

SAMPLES = 128
RECIPE = {'batch': 32, 'base_lr': 0.5, 'base_batch': 8, 'warmup_epochs': 1,
          'epochs': 4, 'samples': SAMPLES}


def recipe(optimizer=None, **changes):
    return large_batch(optimizer or MOMENTUM(), **{**RECIPE, **changes})


SHAPES = {'W1': (5, 4), 'b': (5,), 'W2': (2, 3, 3, 3), 'gamma': (2, 3)}


def drawn(seed):
    generator = numpy.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype('f4')
            for name, shape in SHAPES.items()}


def papers(steps, lars=True, decay=1e-4):
    """SGD with momentum 0.9, in float64, weights told by their names.

    v <- m v - lr g: a later, smaller rate does not slow v down.
    """
    found = {name: array.astype(float) for name, array in drawn(1).items()}
    velocity = dict.fromkeys(found, 0)
    for step in range(steps):
        rate = rate_at(step * 32 / SAMPLES)
        for name, gradient in drawn(step + 2).items():
            weight, gradient = found[name], gradient.astype(float)
            if name.startswith('W'):
                gradient = (paper(weight, gradient, 0.001, decay) if lars
                            else gradient + decay * weight)
            velocity[name] = 0.9 * velocity[name] - rate * gradient
            found[name] = weight + velocity[name]
    return found


@pytest.mark.parametrize(('lars', 'wrapped'), [
    (True, 'before'), (True, 'after'), (False, 'set up')])
@on_ranks(1, 2)
def test_nine_updates_are_those_of_the_papers(comm, lars, wrapped):
    """Inside or around ChainerMN's optimizer, before or after setup."""
    model, optimizer = model_of(**drawn(1)), MOMENTUM()
    if wrapped == 'after':
        optimizer = recipe(optimizer, lars=lars)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizer, create_communicator('float32', comm))
    if wrapped == 'before':
        assert recipe(optimizer, lars=lars) is optimizer
    optimizer.setup(model)
    if wrapped == 'set up':
        recipe(optimizer, lars=lars)
    for step in range(-1, 9):       # the first only broadcasts
        for name, gradient in drawn(max(step, 0) + 2).items():
            # Their mean is the gradient.
            getattr(model, name).grad = gradient * numpy.float32(
                2 * (comm.rank + 1) / (comm.size + 1))
        optimizer.update()
    assert optimizer.t == 9
    for name, array in papers(9, lars).items():
        assert_allclose(getattr(model, name).array, array, rtol=1e-4,
                        atol=1e-5)


class Net(chainer.Chain):
    def __init__(self):
        super().__init__(c1=L.Convolution2D(1, 4, 3),
                         bn=L.BatchNormalization(4), l2=L.Linear(4, 3))

    def forward(self, x):
        h = F.relu(self.bn(self.c1(x)))
        return self.l2(F.average(h, axis=(2, 3)))


@on_ranks(2)
@pytest.mark.parametrize(('name', 'options'), [
    ('float32', {}), ('fp8', {'warmup': 3, 'overlap': True}), ('naive', {})])
def test_an_overflow_on_one_rank_skips_the_update_on_all(
        comm, name, options):
    """mixed16, float32 weights, dynamic loss scaling, and LARS."""
    communicator = create_communicator(name, comm, **options)
    with chainer.using_config('dtype', chainer.mixed16):
        numpy.random.seed(comm.rank)
        model = Net()
        optimizer = MOMENTUM()
        optimizer.loss_scaling(interval=4)
        optimizer = chainermn.create_multi_node_optimizer(
            recipe(optimizer), communicator).setup(model)
        scales = []
        for step in range(8):
            generator = numpy.random.default_rng((step, comm.rank))
            x = generator.normal(size=(8, 1, 6, 6)).astype('f2')
            t = generator.integers(0, 3, 8).astype('i4')
            if step == 5 and comm.rank == 1:
                x[3] = numpy.inf
            before = model.c1.W.array.tobytes()
            with warnings.catch_warnings(), numpy.errstate(all='ignore'):
                warnings.simplefilter('ignore')
                optimizer.update(
                    lambda x=x, t=t: F.softmax_cross_entropy(model(x), t))
            scales.append(float(optimizer._loss_scale))
            now = {name: parameter.array.tobytes()
                   for name, parameter in model.namedparams()}
            assert (now['/c1/W'] == before) == (step == 5 or (
                step == 0 and comm.rank == 0)), step
            assert comm.allgather(now) == [now] * 2
        assert comm.allgather(scales) == [scales] * 2
        assert scales[:6] == [1, 2, 4, 8, 16, 8]
        assert optimizer.t == 7
        assert optimizer.lr == rate_at(6 / 4)
    communicator.finalize()


@on_ranks(2)
def test_a_training_that_diverges_ends_on_all_ranks(comm):
    """Chainer's would skip updates for ever."""
    model, optimizer = model_of(W=numpy.ones((2, 2), 'f4')), MOMENTUM()
    optimizer.loss_scaling()
    optimizer = chainermn.create_multi_node_optimizer(
        recipe(optimizer), create_communicator('fp8', comm)).setup(model)
    scales = []

    def train():
        for step in range(9):
            scales.append(float(optimizer._loss_scale))
            model.W.grad = numpy.full((2, 2), 2, 'f4')
            model.W._loss_scale = scales[-1]
            if step > 2 and comm.rank == 1:
                model.W.grad[0, 1] = numpy.nan
            optimizer.update()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(RuntimeError, match=(
                'the gradient of /W is not finite at a loss scale of 1, '
                'after 4 updates')):
            train()
    assert scales == [1, 1, 2, 4, 2, 1]


@on_ranks(4)
def test_large_batch_works_in_pipelines_with_replicas(comm):
    """As on one rank: LARS is layer by layer, and so is every stage."""
    jobs = [Job(comm, 'Plain', stages, data=dataset(16), batch=16,
                optimizer=recipe(batch=16, samples=16)).updated(4)
            for stages in (2, SERIAL)]
    assert jobs[0].optimizer.lr == jobs[1].optimizer.lr
    close(jobs[0].values(), jobs[1].values(), 1e-5)


# --- bad input ---------------------------------------------------------------

#: The error, and what of the recipe is changed.
BAD = {
    'batch=4 must be from base_batch=8': {'batch': 4},
    'base_batch is 0; it must be a whole': {'base_batch': 0},
    'batch is True; it must': {'batch': True},
    'batch is 32.5; it must be a whole': {'batch': 32.5},
    'base_lr=nan must be above 0 and finite': {'base_lr': math.nan},
    'base_lr=True must be above 0': {'base_lr': True},
    'decay gives nan after 0 epochs': {
        'decay': lambda *_: math.nan, 'warmup_epochs': 0},
    'lars_coefficient=0 must be': {'lars_coefficient': 0},
    'lars is .no.; it must be a bool': {'lars': 'no'},
    'warmup_epochs=-1 must be .* may be 0': {'warmup_epochs': -1},
    'weight_decay=inf must be': {'weight_decay': math.inf},
    'warmup_epochs=4 and epochs=4 must be 0 or more': {'warmup_epochs': 4},
    'decay must be one of polynomial, step, constant': {'decay': 'linear'},
    'to the samples=31: pass': {'samples': 31},
    'Adam has no learning rate lr': {'optimizer': chainer.optimizers.Adam()},
    'object has no learning rate lr': {'optimizer': object()},
    'has been called on this optimizer': {'optimizer': MOMENTUM()}}


@pytest.mark.parametrize('message', BAD)
def test_bad_arguments_are_errors(message):
    if 'called' in message:
        recipe(**BAD[message])
    with pytest.raises(ValueError, match=message):
        recipe(**BAD[message])
