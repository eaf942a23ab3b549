"""LARS, decay of weights, schedules of rates, the end of divergence."""
import warnings

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import (
    FollowEpochs,
    Snapshot,
    resume,
)
from chainer_fp8pipe.training.hooks import (
    LARS,
    RateSchedule,
    StopWhenDiverged,
    WeightDecay,
    is_weight,
)
from chainer_fp8pipe.training.large_batch import large_batch
from chainer_fp8pipe.training.learning_rate import LearningRate

import chainer
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.optimizer_hooks import GradientLARS
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tests.ranks import on_ranks

from .extensions.helpers import weights


def model_of(**arrays):
    """A chain with these parameters."""
    model = chainer.Chain()
    with model.init_scope():
        for name, array in arrays.items():
            setattr(model, name, chainer.Parameter(numpy.array(array)))
    return model


def step(hook, gradients, optimizer=None, scale=None, **arrays):
    """Changes of the parameters by one update, as float64.

    Args:
        hook: Added to the optimizer.
        gradients: By the parameter's name; unscaled.
        optimizer: Default: SGD with a rate of 1.
        scale: Of the loss.
        arrays: The parameters.
    """
    model = model_of(**arrays)
    optimizer = (optimizer or chainer.optimizers.SGD(1.0)).setup(model)
    if hook is not None:
        optimizer.add_hook(hook)
    for name, gradient in gradients.items():
        one = getattr(model, name)
        one.grad = (numpy.asarray(gradient, one.dtype)
                    * one.dtype.type(scale or 1))
        one._loss_scale = scale
    optimizer.update()
    return {name: getattr(model, name).array.astype(float)
            - numpy.asarray(array, float) for name, array in arrays.items()}


W = numpy.array([[3, 0], [0, 4]], 'f4')         # of norm 5
G = numpy.array([[0, 6], [8, 0]], 'f4')         # of norm 10


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
    found = LARS(coefficient, decay).changed(numpy, weight, gradient)
    assert found.dtype == dtype
    assert_allclose(found, expected, rtol=2e-5, atol=2e-6 * max(
        abs(expected).max(), 1e-30))


def test_the_learning_rate_is_inside_of_the_momentum():
    """v <- m v - lr g: a later, smaller rate does not slow v down."""
    model = model_of(W=W)
    optimizer = chainer.optimizers.MomentumSGD(2.0, 0.9).setup(model)
    optimizer.add_hook(LARS(0.01, 0.1))
    weight, velocity = W.astype(float), 0
    for rate in (2.0, 0.5, 0.1):
        optimizer.lr = rate
        model.W.grad = G.copy()
        optimizer.update()
        velocity = 0.9 * velocity - rate * paper(weight, G, 0.01, 0.1)
        weight = weight + velocity
        assert_allclose(model.W.array, weight, rtol=1e-5)


@pytest.mark.parametrize(('hook', 'change'), [
    (LARS(0.01, 0.1), -0.01 * 5 / 10.5 * (G + 0.1 * W)),
    (WeightDecay(0.1), -(G + 0.1 * W))])
def test_biases_and_normalisations_have_plain_gradients(hook, change):
    arrays = {'W': W, 'b': W, 'gamma': W, 'beta': W, 'V': W[0]}
    changes = step(hook, dict.fromkeys(arrays, G) | {'V': G[0]}, **arrays)
    assert_allclose(changes['W'], change, rtol=1e-4)
    for name in ('b', 'gamma', 'beta'):
        assert_allclose(changes[name], -G)
    assert_allclose(changes['V'], -G[0])


def test_a_weight_of_zeros_can_leave_zero():
    assert_allclose(step(LARS(), {'W': G}, W=0 * W)['W'], -G)
    assert_allclose(step(LARS(0.001, 1.0), {'W': G}, W=0 * W)['W'], -G)


def test_a_gradient_of_zeros_leaves_the_decay():
    assert_allclose(step(LARS(), {'W': 0 * G}, W=W)['W'], 0 * W)
    assert_allclose(step(LARS(0.01, 0.5), {'W': 0 * G}, W=W)['W'], -0.01 * W,
                    rtol=1e-5)


@pytest.mark.parametrize('scale', [None, 1.0, 128.0, 65504.0])
@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_does_not_change_lars(scale, dtype):
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    gradient = G / 65504
    change = step(LARS(0.5), {'W': gradient}, optimizer, scale,
                  W=W.astype(dtype))['W']
    assert_allclose(change, -0.5 * 5 / 10 * G, rtol=2e-2, atol=2e-3)


def test_norms_of_float16_do_not_overflow():
    large = numpy.full((300, 300), 300, 'f2')
    change = step(LARS(0.5), {'W': large}, W=large / 64)['W']
    assert_allclose(change, -0.5 * large / 64)


def test_a_gradient_that_is_not_finite_is_not_hidden():
    bad = G.copy()
    for value in (numpy.nan, numpy.inf):
        bad[0, 0] = value
        with numpy.errstate(invalid='ignore'):
            assert not numpy.isfinite(step(LARS(), {'W': bad}, W=W)['W'][0, 0])


def test_the_gradients_array_is_left_alone():
    """Two parameters may have the same one."""
    model = model_of(W=W, V=W)
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(LARS(0.01))
    model.W.grad = model.V.grad = gradient = G.copy()
    gradient.flags.writeable = False
    optimizer.update()
    assert_allclose(model.W.array, model.V.array)


def test_one_weight_may_have_a_coefficient_of_its_own():
    model = model_of(W=W, V=W)
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    model.V.update_rule.add_hook(LARS(0.02))
    optimizer.add_hook(LARS(0.01))
    for _ in range(2):
        model.W.grad, model.V.grad = G.copy(), G.copy()
        model.W.array[...] = model.V.array[...] = W
        optimizer.update()
    assert_allclose(model.V.array - W, 2 * (model.W.array - W), rtol=1e-3)


@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_does_not_change_weight_decay(dtype):
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    change = step(WeightDecay(0.1), {'W': G}, optimizer, 1024.0,
                  W=W.astype(dtype))['W']
    assert_allclose(change, -(G + 0.1 * W), rtol=3e-3)


def test_bad_numbers_are_errors():
    with pytest.raises(ValueError, match='coefficient of LARS must be'):
        LARS(0)
    with pytest.raises(ValueError, match='weight_decay must be'):
        LARS(0.001, -1e-4)
    with pytest.raises(ValueError, match='weight_decay must be'):
        LARS(0.001, float('nan'))
    with pytest.raises(ValueError, match='weight_decay must be a finite'):
        WeightDecay(-1)


# --- what is a weight --------------------------------------------------------

def names_of_weights(link):
    return [name for name, parameter in sorted(link.namedparams())
            if is_weight(parameter)]


def test_weights_are_told_from_the_rest_in_chainers_links():
    model = chainer.Chain(
        linear=L.Linear(3, 2), convolution=L.Convolution2D(1, 2, 3),
        embedding=L.EmbedID(3, 2), lstm=L.LSTM(2, 2),
        batch=L.BatchNormalization(2), again=L.BatchRenormalization(2),
        layer=L.LayerNormalization(2), group=L.GroupNormalization(1, 2),
        slope=L.PReLU(), bias=L.Bias(1, (2, 3)), scale=L.Scale(1, (2,)))
    assert names_of_weights(model) == [
        '/convolution/W', '/embedding/W', '/linear/W', '/lstm/lateral/W',
        '/lstm/upward/W']


def test_parameters_of_normalisations_may_have_several_dimensions():
    model = chainer.Sequential(
        L.BatchNormalization(axis=0, size=(2, 3)),
        L.LocalConvolution2D(1, 2, in_size=4, ksize=3))
    assert model[0].gamma.ndim == 2
    assert model[1].b.ndim == 3
    assert names_of_weights(model) == ['/1/W']


def test_parameters_that_get_their_shape_late_are_judged_then():
    model = chainer.Sequential(L.Linear(None, 2))
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(LARS(0.01))
    model.cleargrads()
    optimizer.update()
    for _ in range(2):
        y = model(numpy.ones((1, 3), 'f4'))
        before = model[0].W.array.copy()
        model.cleargrads()
        y.grad = numpy.ones_like(y.array)
        y.backward()
        optimizer.update()
        change = numpy.linalg.norm(model[0].W.array - before)
        numpy.testing.assert_allclose(
            change, 0.01 * numpy.linalg.norm(before), rtol=1e-5)


# --- Chainer's own: where it is right, and where it is not -------------------

@settings(max_examples=30)
@given(st.integers(0, 2 ** 32 - 1), st.floats(1e-3, 10), st.floats(0, 1))
def test_chainers_is_the_same_for_float32_weights(seed, coefficient, decay):
    """The coefficient is then a factor of the learning rate."""
    generator = numpy.random.default_rng(seed)
    weight = generator.normal(size=(5, 7)).astype('f4')
    gradient = generator.normal(size=weight.shape).astype('f4')
    theirs = step(GradientLARS(weight_decay=decay), {'W': gradient},
                  chainer.optimizers.SGD(coefficient), W=weight)['W']
    ours = step(LARS(coefficient, decay), {'W': gradient}, W=weight)['W']
    assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)


RATE = LearningRate(0.5, 32, 8, 1, 4)


def scheduled(hook):
    optimizer = chainer.optimizers.SGD(7.0).setup(
        model_of(W=numpy.zeros((2, 2), 'f4')))
    optimizer.add_hook(hook)
    return optimizer


def one_update(optimizer):
    """One of gradients of one; returns the rate that was used."""
    weight = optimizer.target.W
    before = weight.array.copy()
    weight.grad = numpy.ones_like(before)
    optimizer.update()
    return float((before - weight.array)[0, 0])


def test_every_update_has_the_rate_of_its_number():
    optimizer = scheduled(RateSchedule(RATE, samples=128))
    used = [one_update(optimizer) for _ in range(18)]
    assert used == pytest.approx(
        [RATE.at(number / 4) for number in range(18)], abs=1e-5)
    assert used[:5] == pytest.approx([0.5, 0.875, 1.25, 1.625, 2.0])
    assert optimizer.lr == 0        # after the last epoch


def test_a_resumed_optimizer_goes_on_where_it_was(tmp_path):
    first = scheduled(RateSchedule(RATE, samples=128))
    used = [one_update(first) for _ in range(6)]
    chainer.serializers.save_npz(tmp_path / 'state.npz', first)
    second = scheduled(RateSchedule(RATE, samples=128))
    chainer.serializers.load_npz(tmp_path / 'state.npz', second)
    assert used + [one_update(second)] == pytest.approx(
        [RATE.at(number / 4) for number in range(7)], abs=1e-5)


def test_the_schedule_takes_the_epoch_it_is_told_without_samples():
    hook = RateSchedule(RATE)
    optimizer = scheduled(hook)
    hook.epoch = 2.5
    assert one_update(optimizer) == pytest.approx(RATE.at(2.5))


def test_not_to_know_how_far_the_training_is_is_an_error():
    with pytest.raises(RuntimeError, match=r'samples=.*FollowEpochs'):
        one_update(scheduled(RateSchedule(RATE)))


@pytest.mark.parametrize(('samples', 'message'), [
    (0, 'samples must be a positive integer, not 0'),
    (1.5, 'samples must be a positive integer, not 1.5'),
    (31, 'batch=32 is more than the samples=31')])
def test_bad_sizes_are_errors(samples, message):
    with pytest.raises(ValueError, match=message):
        RateSchedule(RATE, samples)


def watched(dynamic=True):
    optimizer = chainer.optimizers.SGD(0.25).setup(
        model_of(W=numpy.ones((2, 2), 'f4'), b=numpy.ones(2, 'f4')))
    optimizer.add_hook(StopWhenDiverged())
    if dynamic:
        optimizer.loss_scaling()
    return optimizer


def scaled_update(optimizer, bad=False):
    for parameter in optimizer.target.params():
        parameter.grad = numpy.ones_like(parameter.array)
        parameter._loss_scale = optimizer._loss_scale
    if bad:
        optimizer.target.b.grad[1] = numpy.nan
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        optimizer.update()


def test_an_overflow_at_a_larger_scale_is_skipped():
    optimizer = watched()
    scaled_update(optimizer)
    scaled_update(optimizer)
    before = optimizer.target.W.array.copy()
    assert optimizer._loss_scale == 4
    scaled_update(optimizer, bad=True)
    assert optimizer._loss_scale == 2
    assert (optimizer.target.W.array == before).all()


def test_an_overflow_at_a_loss_scale_of_one_ends_the_training():
    optimizer = watched()
    scaled_update(optimizer)
    scaled_update(optimizer, bad=True)
    before = optimizer.target.W.array.copy()
    with pytest.raises(RuntimeError, match=(
            'the gradient of /b is not finite at a loss scale of 1, after 2 '
            'updates, with a learning rate of 0.25')):
        scaled_update(optimizer, bad=True)
    assert (optimizer.target.W.array == before).all()


def test_another_stage_may_be_the_one():
    optimizer = watched()
    optimizer.add_hook(_elsewhere)
    hooks = optimizer._hookable._pre_update_hooks
    hooks.move_to_end('_elsewhere', last=False)
    with pytest.raises(RuntimeError, match='a gradient of another stage is'):
        scaled_update(optimizer)


def _elsewhere(optimizer):
    optimizer._loss_scaling_isnan = True


def test_the_divergence_hook_does_nothing_without_dynamic_loss_scaling():
    optimizer = watched(dynamic=False)
    scaled_update(optimizer, bad=True)
    assert numpy.isnan(optimizer.target.b.array).any()


SLOW_RATE = LearningRate(0.05, 32, 8, 1, 6)


def make_trainer(out, comm=None, samples=None, size=40, epochs=3,
                 follow=True):
    """Batches of 8 per rank; returns the trainer and all rates so far."""
    numpy.random.seed(0)
    model = L.Classifier(L.Linear(6, 3))
    numpy.random.seed(1 + (comm.rank if comm else 0))
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(
            numpy.random.rand(size, 6).astype('f4'),
            numpy.random.randint(0, 3, size).astype('i4')), 8)
    optimizer = large_batch(
        chainer.optimizers.MomentumSGD(), 32, 0.05, 8, 1, 6,
        samples=samples)
    if comm:
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    trainer = Trainer(StandardUpdater(iterator, optimizer.setup(model)),
                      (epochs, 'epoch'), str(out))
    rates = []

    def note(trainer):
        rates.append(trainer.updater.get_optimizer('main').lr)
    trainer.extend(note, trigger=(1, 'iteration'))
    if follow:
        trainer.extend(FollowEpochs())
    return trainer, rates


def test_the_rate_follows_the_iterators_epochs(tmp_path):
    trainer, rates = make_trainer(tmp_path)
    trainer.run()
    assert rates == pytest.approx(
        [SLOW_RATE.at(step / 5) for step in range(15)])


@on_ranks(2)
def test_ranks_with_shares_of_other_sizes_keep_one_rate(comm, tmp_path):
    communicator = create_communicator('float32', comm)
    trainer, rates = make_trainer(tmp_path, communicator,
                                  size=40 + 16 * comm.rank)
    trainer.stop_trigger = chainer.training.get_trigger((15, 'iteration'))
    trainer.run()
    # The first update of ChainerMN's optimizer is none.
    assert rates[1:] == pytest.approx(
        [SLOW_RATE.at(step / 5) for step in range(1, 15)])
    assert comm.allgather(rates) == [rates] * 2
    assert len(set(comm.allgather(weights(trainer)['predictor/W']))) == 1


@on_ranks(2)
@pytest.mark.parametrize('samples', [None, 80])
def test_a_resumed_run_ends_with_the_same_bits(comm, tmp_path, samples):
    """Snapshot in mid-epoch, during the warm-up."""
    communicator = create_communicator('float32', comm)

    def run(folder, iterations, resumed=False):
        trainer, rates = make_trainer(tmp_path / folder, communicator,
                                      samples, follow=samples is None)
        trainer.stop_trigger = chainer.training.get_trigger(
            (iterations, 'iteration'))
        trainer.extend(Snapshot(communicator), trigger=(4, 'iteration'))
        if resumed:
            resume(trainer, communicator, str(tmp_path / folder))
        trainer.run()
        return trainer, rates
    whole, rates = run('whole', 11)
    run('part', 4)
    part, rest = run('part', 11, resumed=True)
    assert rates[4:] == rest
    assert weights(whole) == weights(part)


def test_nothing_to_follow_for_is_an_error(tmp_path):
    trainer, _ = make_trainer(tmp_path, follow=False)
    trainer.updater.get_optimizer('main').remove_hook('Schedule')
    trainer.extend(FollowEpochs())
    with pytest.raises(ValueError, match='nothing to follow for'):
        trainer.run()
