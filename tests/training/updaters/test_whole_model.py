"""Optimizers that decide over all stages, against serial Chainer."""
import contextlib

from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    create_communicator,
    partition,
)
from chainer_fp8pipe.links import Divisible

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientNoise

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, close, dataset, gathered
from tests.training.updaters.partitions import plan_of
from tests.training.updaters.test_pipeline_updater import (
    make_updater,
    update,
)


def parameters(model):
    return {name: parameter.array.copy()
            for name, parameter in model.namedparams()}


def train_serially(network, data, optimizer, updates, prepare):
    """Plain Chainer: no micro-batches, one model, one optimizer."""
    model = network()
    optimizer.setup(model)
    prepare(optimizer)
    inputs, labels = data
    for _ in range(updates):
        with chainer.using_config('train', True):
            optimizer.update(
                lambda: F.softmax_cross_entropy(model(inputs), labels))
    return parameters(model)


def train_in_pipeline(comm, network, data, optimizer, updates, prepare,
                      **options):
    updater = make_updater(comm, network, data, optimizer,
                           micro_batches=3, **options)
    prepare(optimizer)
    for _ in range(updates):
        update(updater)
    return gathered(comm, parameters(optimizer.target))


PREPARATIONS = {
    'clipping': lambda optimizer: optimizer.add_hook(
        chainer.optimizer_hooks.GradientClipping(0.1)),
    'clipping that does nothing': lambda optimizer: optimizer.add_hook(
        chainer.optimizer_hooks.GradientClipping(100.0)),
    'weight decay': lambda optimizer: optimizer.add_hook(
        chainer.optimizer_hooks.WeightDecay(0.1)),
    'both': lambda optimizer: [optimizer.add_hook(hook) for hook in (
        chainer.optimizer_hooks.WeightDecay(0.1),
        chainer.optimizer_hooks.GradientClipping(0.1))],
    'static loss scale': lambda optimizer: optimizer.loss_scaling(scale=128),
    'dynamic loss scale': lambda optimizer: optimizer.loss_scaling(),
}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('name', PREPARATIONS)
def test_an_optimizer_acts_as_on_the_whole_model(comm, name):
    data = dataset(12)
    arguments = (Plain, data, chainer.optimizers.MomentumSGD(0.5), 4,
                 PREPARATIONS[name])
    expected = train_serially(*arguments)
    found = train_in_pipeline(
        comm, Plain, data, chainer.optimizers.MomentumSGD(0.5), 4,
        PREPARATIONS[name])
    close(found, expected, 1e-5)


@on_ranks(2, 4)
def test_a_threshold_that_is_changed_later_counts(comm):
    data = dataset(12)
    optimizer = chainer.optimizers.SGD(1.0)
    updater = make_updater(comm, Plain, data, optimizer, micro_batches=2)
    hook = chainer.optimizer_hooks.GradientClipping(1e9)
    optimizer.add_hook(hook)
    update(updater)
    hook.threshold = 1e-3
    before = parameters(optimizer.target)
    update(updater)
    moved = sum(((parameters(optimizer.target)[name] - array) ** 2).sum()
                for name, array in before.items())
    assert comm.allreduce(float(moved)) ** 0.5 == pytest.approx(1e-3, rel=0.01)


class Overflowing(Divisible):
    """Large inputs make the gradient of its first layer overflow, only."""

    def __init__(self):
        super().__init__()
        np.random.seed(0)
        self.append(L.Linear(8, 4))
        self.append(F.sin)      # what follows is small, and not flat
        self.append(lambda x: x)
        self.append(L.Linear(4, 5))


@on_ranks(1, 2, 4)
def test_one_stages_overflow_makes_all_stages_skip_the_update(comm):
    inputs, labels = dataset(6)
    optimizer = chainer.optimizers.SGD(1.0)
    updater = make_updater(comm, Overflowing, (inputs, labels), optimizer,
                           micro_batches=2)
    optimizer.loss_scaling()
    optimizer._loss_scale = 2.0 ** 14
    update(updater)
    assert optimizer._loss_scale > 2 ** 14
    before = parameters(optimizer.target)
    scale = optimizer._loss_scale
    if comm.rank == 0:      # only the first layer's gradient is spoiled
        inputs[0] = 1e37
    warned = pytest.warns(UserWarning, match='Non finite')
    with np.errstate(all='ignore'), (
            warned if comm.rank == 0 else contextlib.nullcontext()):
        update(updater)
    after = parameters(optimizer.target)
    assert optimizer._loss_scale == scale / 2
    for name, array in before.items():
        assert after[name].tobytes() == array.tobytes()


@on_ranks(1, 2, 4)
def test_four_stages_train_to_the_serial_weights(comm):
    """The paper's figure 2, on scikit-learn's digits, for two epochs."""
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    images = (images[:1200] / 16).astype('f')
    labels = labels[:1200].astype('i')
    batches = [slice(start, start + 60) for start in range(0, 1200, 60)] * 2

    def serial():
        model = Digits()
        optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
        losses = []
        for batch in batches:
            with chainer.using_config('train', True):
                loss = F.softmax_cross_entropy(
                    model(images[batch]), labels[batch])
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
        return parameters(model), losses

    optimizer = chainer.optimizers.MomentumSGD(0.05)
    updater = make_updater(comm, Digits, (images, labels), optimizer,
                           batch=60, micro_batches=4)
    found = [update(updater)['main/loss'] for _ in batches]
    weights, expected = serial()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[-1] < 0.4 * found[0]
    close(gathered(comm, parameters(optimizer.target)), weights, 1e-5)


class Digits(Divisible):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        for _ in range(3):
            self.append(L.Linear(64, 64))
            self.append(F.relu)
        self.append(L.Linear(64, 10))


class Twice(chainer.Chain):
    """Uses its first layer again at its end."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(4, 4, initialW=np.eye(4) / 2)
            self.b = L.Linear(4, 4, initialW=np.eye(4) / 3)

    def forward(self, x):
        return F.mean(self.a(F.tanh(self.b(F.tanh(self.a(x))))) ** 2)


@on_ranks(3)
def test_a_stage_without_parameters_clips_as_all_do(comm):
    class Net(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.a = L.Linear(4, 4, initialW=np.eye(4) / 2)
                self.b = L.Linear(4, 4, initialW=np.eye(4) / 3)

        def forward(self, x):
            return F.sum(self.b(F.tanh(self.a(x))) ** 2)
    # The tanh alone is on the second rank.
    plan = {**plan_of([['/a/W', '/a/b'], ['/b/W', '/b/b']], '/a/W', '/b/W'),
            'stages': 3}
    plan['cuts'][0]['calls_later'] = 1
    x = np.random.RandomState(0).rand(4, 4).astype('f')
    serial = Net()
    reference = chainer.optimizers.SGD(0.1).setup(serial)
    model = partition(Net(), x[:2], comm, micro_batches=2, plan=plan)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    assert len([*model.params()]) == (0 if comm.rank == 1 else 2)
    for one in reference, optimizer:
        one.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))
    updater = PipelineUpdater(chainer.iterators.SerialIterator(
        x, 4, shuffle=False), optimizer, comm)
    for _ in range(3):
        updater.update()
        # The pipeline's loss is the mean of those of its micro-batches.
        reference.update(lambda: (serial(x[:2]) + serial(x[2:])) / 2)
    expected = dict(serial.namedparams())
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(
            parameter.array, expected[name].array, rtol=1e-5)


@pytest.mark.parametrize('owner', ['optimizer', 'update rules'])
@on_ranks(2)
def test_tied_copies_get_the_same_noise(comm, owner):
    plan = plan_of([[f'/{name}/W', f'/{name}/b'] for name in 'ab'], '/b/W')
    x = np.random.RandomState(0).rand(4, 4).astype('f')
    model = partition(Twice(), x[:2], comm, micro_batches=2, plan=plan)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    for place in [optimizer] if owner == 'optimizer' else [
            parameter.update_rule for parameter in model.params()]:
        place.add_hook(GradientNoise(1.0))
    np.random.seed(comm.rank)
    updater = PipelineUpdater(chainer.iterators.SerialIterator(x, 4),
                              optimizer, comm)
    before = np.eye(4) / 2
    for _ in range(3):
        updater.update()
        assert abs(model.a.W.array - before).max() > 1e-3
        before = model.a.W.array.copy()
        assert len(set(comm.allgather(before.tobytes()))) == 1
    assert abs(model.a.W.array - model.a.W.array.T).max() > 1e-3


@on_ranks(2)
def test_replicas_get_the_same_noise(comm):
    grid = ProcessGrid(comm, pipeline=1)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), create_communicator(
            'float32', grid.data)).setup(Plain().stage(grid))
    optimizer.add_hook(GradientNoise(1.0))
    np.random.seed(comm.rank)
    updater = PipelineUpdater(chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*dataset(8)), 4), optimizer, grid)
    for _ in range(2):
        updater.update()
        bits = [parameter.array.tobytes()
                for _, parameter in optimizer.target.namedparams()]
        assert comm.allgather(bits) == [bits] * comm.size
    grid.free()


class MyClipping(chainer.optimizer_hooks.GradientClipping):
    pass


@on_ranks(1, 2)
def test_a_clipping_that_would_see_one_stage_only_is_refused(comm):
    optimizer = chainer.optimizers.SGD(0.1)
    updater = make_updater(comm, Plain, dataset(8), optimizer,
                           micro_batches=2)
    optimizer.add_hook(MyClipping(1.0))
    if comm.size == 1:
        updater.update()
        return
    with pytest.raises(ValueError, match="a MyClipping, would see the "
                                         'gradients of one stage only'):
        updater.update()


@on_ranks(1, 2)
def test_a_hook_that_keeps_gradients_compares_what_it_does_serially(comm):
    class Turns:
        """How far the gradient turns from update to update."""

        name, timing, call_for_each_param = 'Turns', 'pre', False

        def __init__(self):
            self.last, self.found = {}, []

        def __call__(self, optimizer):
            now = {name: parameter.grad for name, parameter
                   in optimizer.target.namedparams()}
            self.found.append({
                name: float((gradient * self.last[name]).sum())
                for name, gradient in now.items() if name in self.last})
            self.last = now
    data = dataset(12)
    serial, hook = Plain(), Turns()
    optimizer = chainer.optimizers.SGD(0.5).setup(serial)
    optimizer.add_hook(hook)
    for _ in range(3):
        optimizer.update(lambda: F.softmax_cross_entropy(
            serial(data[0]), data[1]))
    expected, hook = hook.found, Turns()
    optimizer = chainer.optimizers.SGD(0.5)
    updater = make_updater(comm, Plain, data, optimizer, micro_batches=3)
    optimizer.add_hook(hook)
    for _ in range(3):
        updater.update()
    for found, wanted in zip(hook.found, expected, strict=True):
        for name, value in found.items():
            assert value == pytest.approx(wanted[name], rel=1e-3), name
