"""Optimizers that decide over all stages, against serial Chainer."""
from chainer_fp8pipe import PipelineUpdater, partition
from chainer_fp8pipe.links import Divisible

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import (
    GradientClipping,
    GradientNoise,
    WeightDecay,
)
from chainer.optimizers import SGD, MomentumSGD

from tests.models.judge import close as close_in_norm
from tests.models.judge import gradients, own, plan_of
from tests.ranks import on_ranks
from tests.training.trainers import SERIAL, Job
from tests.training.updaters.networks import close, dataset

PREPARATIONS = {
    'clipping': lambda optimizer: optimizer.add_hook(GradientClipping(0.1)),
    'clipping of Chainer 3': lambda optimizer: optimizer.add_hook(
        chainer.optimizer.GradientClipping(0.1)),
    'clipping that does nothing': lambda optimizer: optimizer.add_hook(
        GradientClipping(100.0)),
    'weight decay': lambda optimizer: optimizer.add_hook(WeightDecay(0.1)),
    'both': lambda optimizer: [optimizer.add_hook(hook) for hook in (
        WeightDecay(0.1), GradientClipping(0.1))],
    'static loss scale': lambda optimizer: optimizer.loss_scaling(scale=128),
    'dynamic loss scale': lambda optimizer: optimizer.loss_scaling(),
}


@on_ranks(2, 4)
@pytest.mark.parametrize('name', PREPARATIONS)
def test_an_optimizer_acts_as_on_the_whole_model_and_batch(comm, name):
    """Over two stages, with two replicas of each on four ranks."""
    jobs = [Job(comm, 'Plain', way, data=dataset(12),
                optimizer=MomentumSGD(0.5)) for way in (2, SERIAL)]
    seen = []
    for job in jobs:
        PREPARATIONS[name](getattr(job.optimizer, 'actual_optimizer',
                                   job.optimizer))
        seen.append([one['main/loss'] for one in job.update(4)])
    close(jobs[0].values(), jobs[1].values(), 1e-5)
    np.testing.assert_allclose(*seen, rtol=1e-5)


class Overflowing(Divisible):
    """Large inputs make the gradient of its first layer overflow, only."""

    def __init__(self):
        np.random.seed(0)
        # What follows the sine is small, and not flat.
        super().__init__(L.Linear(8, 4), F.sin, lambda x: x, L.Linear(4, 5))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(('stages', 'sample'), [
    (None, 0), (2, 0), (2, 11)])        # of either replica
def test_an_overflow_on_one_rank_makes_all_skip_the_update(
        comm, stages, sample):
    """As in serial training, of three updates the second."""
    inputs, labels = dataset(12)
    if comm.size == 1:
        stages = None

    def train(job):
        optimizer = job.optimizer
        optimizer.loss_scaling()
        optimizer._loss_scale = 2.0 ** 14
        scales, weights = [], [job.values()]
        for value in (0.5, 1e37, 0.5):
            inputs[sample] = value
            with np.errstate(all='ignore'):
                job.update()
            scales.append(optimizer._loss_scale)
            weights.append(job.values())
        assert [all((weights[step + 1][name] == array).all()
                    for name, array in weights[step].items())
                for step in range(3)] == [False, True, False]
        assert scales[1] == scales[0] / 2
        return scales, weights[-1]
    (scales, found), (others, expected) = (train(Job(
        comm, Overflowing, way, data=(inputs, labels),
        optimizer=MomentumSGD(0.5))) for way in (stages, SERIAL))
    assert scales == others
    close(found, expected, 1e-5)


class Net(chainer.Chain):
    """``again``: uses its first layer again at its end."""

    def __init__(self, again=False):
        super().__init__(a=L.Linear(4, 4, initialW=np.eye(4) / 2),
                         b=L.Linear(4, 4, initialW=np.eye(4) / 3))
        self.again = again

    def forward(self, x):
        y = self.b(F.tanh(self.a(x)))
        return F.mean((self.a(F.tanh(y)) if self.again else y) ** 2)


X = np.random.RandomState(0).rand(4, 4).astype('f')
ORDER = [[f'/{name}/W', f'/{name}/b'] for name in 'ab']


def cut(comm, model, plan, *hooks):
    partition(model, X[:2], comm, micro_batches=2, plan=plan)
    optimizer = SGD(0.1).setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    return optimizer, PipelineUpdater(
        chainer.iterators.SerialIterator(X, 4, shuffle=False), optimizer,
        comm)


@on_ranks(3)
def test_a_stage_without_parameters_clips_as_all_do(comm):
    """The tanh alone is on the second rank."""
    plan = {**plan_of(ORDER, '/a/W', '/b/W'), 'stages': 3}
    plan['cuts'][0][1] = 1
    serial, model = Net(), Net()
    reference = SGD(0.1).setup(serial)
    reference.add_hook(GradientClipping(0.1))
    _, updater = cut(comm, model, plan, GradientClipping(0.1))
    assert len([*model.params()]) == (0 if comm.rank == 1 else 2)
    assert [line.split()[-1] for line in str(model).split('\n')[2:]] == [
        '/a/W', 'none', '/b/W']
    for _ in range(3):
        updater.update()
        # The pipeline's loss is the mean of those of its micro-batches.
        reference.update(lambda: (serial(X[:2]) + serial(X[2:])) / 2)
    close_in_norm(gradients(comm, model), own(serial), 1e-5)
    expected = dict(serial.namedparams())
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(
            parameter.array, expected[name].array, rtol=1e-5)


@pytest.mark.parametrize('owner', ['optimizer', 'update rules'])
@on_ranks(2)
def test_noise_that_ranks_would_draw_apart_is_refused_on_all(comm, owner):
    model = Net(again=True)
    optimizer, updater = cut(comm, model, plan_of(ORDER, '/b/W'))
    for place in [optimizer] if owner == 'optimizer' else [
            parameter.update_rule for parameter in model.params()]:
        place.add_hook(GradientNoise(1.0))
    with pytest.raises(ValueError, match='GradientNoise, would draw other'):
        updater.update()


class MyClipping(GradientClipping):
    def __call__(self, optimizer):
        super().__call__(optimizer)


def looking(optimizer):
    """A hook that gets all parameters at once."""


class Counting:
    """A hook of each parameter."""

    call_for_each_param = True

    def __init__(self):
        self.number = 0

    def __call__(self, rule, parameter):
        self.number += 1


SEES = 'a .*, would see the .*gradients of one stage only'


@pytest.mark.parametrize('timing', ['pre', 'post'])
@pytest.mark.parametrize(('hook', 'said'), [
    (MyClipping(1.0), SEES), (looking, SEES),
    (Counting(), "changes its 'number' .* of one stage only")])
@on_ranks(1, 2)
def test_a_hook_that_would_see_one_stage_only_is_refused(comm, hook, said,
                                                         timing):
    job = Job(comm)
    job.optimizer.add_hook(hook, 'mine', timing)
    if comm.size == 1:
        job.update()
        return
    with pytest.raises((ValueError, RuntimeError),
                       match=f"hook 'mine',? {said}"):
        job.update()
