import copy
import pickle
import warnings

from chainer_fp8pipe import (
    Divisible,
    PipelineUpdater,
    ProcessGrid,
    create_communicator,
    lazy,
)
from chainer_fp8pipe.training.hooks import LARS
from chainer_fp8pipe.training.large_batch import large_batch
from chainer_fp8pipe.training.learning_rate import LearningRate

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from numpy.testing import assert_allclose

from tests.ranks import on_ranks

from .test_hooks import model_of

SAMPLES = 128
RECIPE = {'batch': 32, 'base_lr': 0.5, 'base_batch': 8, 'warmup_epochs': 1,
          'epochs': 4, 'samples': SAMPLES}


def recipe(optimizer=None, **changes):
    return large_batch(optimizer or chainer.optimizers.MomentumSGD(),
                       **{**RECIPE, **changes})


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(1, 4, 3)
            self.bn = L.BatchNormalization(4)
            self.l2 = L.Linear(4, 3)

    def forward(self, x):
        h = F.relu(self.bn(self.c1(x)))
        return self.l2(F.average(h, axis=(2, 3)))


def batch(step, rank, size=8):
    generator = numpy.random.default_rng((step, rank))
    x = generator.normal(size=(size, 1, 6, 6))
    return (x.astype(chainer.get_dtype()),
            generator.integers(0, 3, size).astype('i4'))


def bits(model):
    return b''.join(parameter.array.tobytes()
                    for _, parameter in sorted(model.namedparams()))


# --- the whole recipe against the papers' equations -------------------------

def paper(arrays, gradients, steps, lars=True, decay=1e-4):
    """SGD with momentum 0.9, in float64, weights told by their names."""
    rates = LearningRate(*[RECIPE[name] for name in (
        'base_lr', 'batch', 'base_batch', 'warmup_epochs', 'epochs')])
    found = {name: array.astype(float) for name, array in arrays.items()}
    velocity = dict.fromkeys(arrays, 0)
    for step in range(steps):
        rate = rates.at(step * 32 / SAMPLES)
        for name, weight in found.items():
            gradient = gradients(step)[name].astype(float)
            if name.startswith('W'):
                norms = [numpy.sqrt((array ** 2).sum())
                         for array in (weight, gradient)]
                scale = (0.001 * norms[0] / (norms[1] + decay * norms[0])
                         if lars else 1)
                gradient = scale * (gradient + decay * weight)
            velocity[name] = 0.9 * velocity[name] - rate * gradient
            found[name] = weight + velocity[name]
    return found


def arrays_and_gradients():
    shapes = {'W1': (5, 4), 'b': (5,), 'W2': (2, 3, 3, 3), 'gamma': (2, 3)}
    arrays = {name: numpy.random.default_rng(1).normal(size=shape).astype(
        'f4') for name, shape in shapes.items()}

    def gradients(step):
        generator = numpy.random.default_rng(step + 2)
        return {name: generator.normal(size=shape).astype('f4')
                for name, shape in shapes.items()}
    return arrays, gradients


@pytest.mark.parametrize('lars', [True, False])
@pytest.mark.parametrize('order', ['before setup', 'after setup'])
def test_twelve_updates_are_those_of_the_papers(lars, order):
    arrays, gradients = arrays_and_gradients()
    model = model_of(**arrays)
    if order == 'before setup':
        optimizer = recipe(lars=lars).setup(model)
    else:
        optimizer = recipe(chainer.optimizers.MomentumSGD().setup(model),
                           lars=lars)
    for step in range(12):
        for name, gradient in gradients(step).items():
            getattr(model, name).grad = gradient
        optimizer.update()
    for name, array in paper(arrays, gradients, 12, lars).items():
        assert_allclose(getattr(model, name).array, array, rtol=1e-4,
                        atol=1e-5)


# --- set up, wrapped, copied -------------------------------------------------

@on_ranks(1, 2)
@pytest.mark.parametrize('wrapped', ['before', 'after'])
def test_large_batch_goes_inside_or_around_chainermns_optimizer(comm, wrapped):
    communicator = create_communicator('float32', comm)
    arrays, gradients = arrays_and_gradients()
    model = model_of(**arrays)
    optimizer = chainer.optimizers.MomentumSGD()
    if wrapped == 'after':
        optimizer = recipe(optimizer)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, communicator)
    if wrapped == 'before':
        assert recipe(optimizer) is optimizer
    optimizer.setup(model)
    for step in range(-1, 9):       # the first only broadcasts
        for name, gradient in gradients(max(step, 0)).items():
            # Their mean is the gradient.
            getattr(model, name).grad = gradient * numpy.float32(
                2 * (comm.rank + 1) / (comm.size + 1))
        optimizer.update()
    assert optimizer.t == 9
    for name, array in paper(arrays, gradients, 9).items():
        assert_allclose(getattr(model, name).array, array, rtol=1e-4,
                        atol=1e-5)


@pytest.mark.parametrize('copied', [
    copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_has_hooks_of_its_own(copied):
    optimizer = recipe()
    other = copied(optimizer)
    model = model_of(W=numpy.ones((2, 2), 'f4'))
    assert other.setup(model) is other
    assert optimizer.target is None
    model.W.grad = numpy.ones((2, 2), 'f4')
    other.update()
    assert_allclose(model.W.array, 1 - 0.5 * 0.001, rtol=1e-5)


# --- mixed precision with every communicator ---------------------------------

def communicators():
    for name in ('float32', 'float16', 'fp8', 'fp8_paper', 'torus2d'):
        yield name, {}
    for name in ('float32', 'float16', 'fp8'):
        yield name, {'overlap': True}
    yield 'naive', {}


@on_ranks(2)
@pytest.mark.parametrize(('name', 'options'), communicators())
def test_an_overflow_on_one_rank_skips_the_update_on_all(
        comm, name, options):
    """mixed16, float32 weights, dynamic loss scaling, and LARS."""
    if name.startswith('fp8'):
        options = {'warmup': 3, **options}
    communicator = create_communicator(name, comm, **options)
    with chainer.using_config('dtype', chainer.mixed16):
        numpy.random.seed(comm.rank)
        model = Net()
        optimizer = chainer.optimizers.MomentumSGD()
        optimizer.loss_scaling(interval=4)
        optimizer = chainermn.create_multi_node_optimizer(
            recipe(optimizer), communicator).setup(model)
        scales = []
        for step in range(8):
            x, t = batch(step, comm.rank)
            if step == 5 and comm.rank == 1:
                x[3] = numpy.inf
            before = bits(model)
            with warnings.catch_warnings(), numpy.errstate(all='ignore'):
                warnings.simplefilter('ignore')
                optimizer.update(
                    lambda x=x, t=t: F.softmax_cross_entropy(model(x), t))
            scales.append(float(optimizer._loss_scale))
            assert (bits(model) == before) == (step == 5 or (
                step == 0 and comm.rank == 0)), step
            assert len(set(comm.allgather(bits(model)))) == 1
        assert len(set(comm.allgather(tuple(scales)))) == 1
        assert scales[:6] == [1, 2, 4, 8, 16, 8]
        assert optimizer.t == 7
        assert optimizer.lr == LearningRate(0.5, 32, 8, 1, 4).at(6 / 4)
    assert model.c1.W.dtype == model.l2.b.dtype == numpy.float16
    assert model.bn.gamma.dtype == model.bn.avg_var.dtype == numpy.float32
    copies = [parameter.update_rule._fp32_param
              for parameter in (model.c1.W, model.l2.b)]
    assert [one.dtype for one in copies] == [numpy.float32] * 2
    assert_allclose(copies[0].array, model.c1.W.array, rtol=1e-3)
    communicator.finalize()


@on_ranks(2)
def test_a_training_that_diverges_ends_on_all_ranks(comm):
    """Chainer's would skip updates for ever."""
    communicator = create_communicator('fp8', comm)
    model = model_of(W=numpy.ones((2, 2), 'f4'))
    optimizer = chainer.optimizers.MomentumSGD()
    optimizer.loss_scaling()
    optimizer = chainermn.create_multi_node_optimizer(
        recipe(optimizer), communicator).setup(model)
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
    x = numpy.random.default_rng(0).normal(size=(16, 4)).astype('f4')
    t = (numpy.arange(16) % 3).astype('i4')
    grid = ProcessGrid(comm, pipeline=2)

    def net():
        return Divisible(lazy(L.Linear, 4, 5), F.tanh, lazy(L.Linear, 5, 3))
    model = net().stage(grid)
    optimizer = chainermn.create_multi_node_optimizer(
        recipe(batch=16, samples=16), create_communicator(
            'float32', grid.data)).setup(model)
    part = slice(8 * grid.replica_index, 8 * grid.replica_index + 8)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(x[part], t[part]), 8,
            shuffle=False) if grid.stage_index == 0 else None,
        optimizer, grid, micro_batches=2)
    serial = net()
    alone = recipe(batch=16, samples=16).setup(serial)
    for _ in range(4):
        updater.update()
        alone.update(lambda: F.softmax_cross_entropy(serial(x), t))
    assert optimizer.lr == alone.lr
    expected = dict(serial.namedparams())
    for name, parameter in model.namedparams():
        assert_allclose(parameter.array, expected[name].array, rtol=1e-5,
                        atol=1e-6)


# --- bad input ---------------------------------------------------------------

@pytest.mark.parametrize(('wrong', 'message'), [
    ({'batch': 4}, 'batch=4 is less than base_batch=8'),
    ({'warmup_epochs': 5}, 'warmup_epochs=5 must be less than epochs=4'),
    ({'base_lr': float('nan')}, 'base_lr must be a finite number above 0'),
    ({'weight_decay': -1}, 'weight_decay must be a finite number not below'),
    ({'lars_coefficient': 0}, 'the coefficient of LARS must be'),
    ({'samples': 16}, 'batch=32 is more than the samples=16'),
    ({'decay': 'linear'}, 'decay must be one of')])
def test_bad_numbers_are_errors_and_change_nothing(wrong, message):
    optimizer = chainer.optimizers.MomentumSGD(0.25)
    with pytest.raises(ValueError, match=message):
        recipe(optimizer, **wrong)
    assert optimizer.lr == 0.25
    recipe(optimizer)


@pytest.mark.parametrize('kind', ['Adam', 'AdaDelta', None])
def test_an_optimizer_without_learning_rate_is_an_error(kind):
    optimizer = getattr(chainer.optimizers, kind)() if kind else object()
    with pytest.raises(ValueError, match=(
            f'{kind or "object"} has no learning rate lr')):
        recipe(optimizer)


def test_to_prepare_an_optimizer_twice_is_an_error():
    with pytest.raises(ValueError, match='has been called on this optimizer'):
        recipe(recipe())


def test_hooks_that_are_there_already_are_an_error():
    optimizer = chainer.optimizers.SGD().setup(
        model_of(W=numpy.ones((2, 2), 'f4')))
    optimizer.add_hook(LARS())
    with pytest.raises(KeyError, match='LARS'):
        recipe(optimizer)


def test_a_coefficient_without_lars_is_an_error():
    with pytest.raises(ValueError, match='lars_coefficient=0.1 is of LARS'):
        large_batch(chainer.optimizers.MomentumSGD(), 64, 0.1, 32, 1, 9,
                    lars=False, lars_coefficient=0.1)
