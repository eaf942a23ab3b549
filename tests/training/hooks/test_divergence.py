import warnings

from chainer_fp8pipe.training.hooks import StopWhenDiverged

import chainer
import numpy
import pytest

from .helpers import model_of


def set_up(dynamic=True):
    optimizer = chainer.optimizers.SGD(0.25).setup(
        model_of(W=numpy.ones((2, 2), 'f4'), b=numpy.ones(2, 'f4')))
    optimizer.add_hook(StopWhenDiverged())
    if dynamic:
        optimizer.loss_scaling()
    return optimizer


def update(optimizer, bad=False):
    for parameter in optimizer.target.params():
        parameter.grad = numpy.ones_like(parameter.array)
        parameter._loss_scale = optimizer._loss_scale
    if bad:
        optimizer.target.b.grad[1] = numpy.nan
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        optimizer.update()


def test_an_overflow_at_a_larger_scale_is_skipped():
    optimizer = set_up()
    update(optimizer)
    update(optimizer)
    before = optimizer.target.W.array.copy()
    assert optimizer._loss_scale == 4
    update(optimizer, bad=True)
    assert optimizer._loss_scale == 2
    assert (optimizer.target.W.array == before).all()


def test_an_overflow_at_a_loss_scale_of_one_ends_the_training():
    optimizer = set_up()
    update(optimizer)
    update(optimizer, bad=True)
    before = optimizer.target.W.array.copy()
    with pytest.raises(RuntimeError, match=(
            'the gradient of /b is not finite at a loss scale of 1, after 2 '
            'updates, with a learning rate of 0.25')):
        update(optimizer, bad=True)
    assert (optimizer.target.W.array == before).all()


def test_another_stage_may_be_the_one():
    optimizer = set_up()
    optimizer.add_hook(_elsewhere)
    hooks = optimizer._hookable._pre_update_hooks
    hooks.move_to_end('_elsewhere', last=False)
    with pytest.raises(RuntimeError, match='a gradient of another stage is'):
        update(optimizer)


def _elsewhere(optimizer):
    optimizer._loss_scaling_isnan = True


def test_the_divergence_hook_does_nothing_without_dynamic_loss_scaling():
    optimizer = set_up(dynamic=False)
    update(optimizer, bad=True)
    assert numpy.isnan(optimizer.target.b.array).any()
