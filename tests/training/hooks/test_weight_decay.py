from chainer_fp8pipe.training.hooks import WeightDecay

import chainer
import numpy
import pytest
from numpy.testing import assert_allclose

from .helpers import step

W = numpy.array([[1, -2], [3, 4]], 'f4')
G = numpy.array([[0.5, 1], [-1, 0]], 'f4')


def test_weights_decay_and_nothing_else_does():
    arrays = {'W': W, 'b': W, 'gamma': W, 'beta': W, 'V': W[0]}
    changes = step(WeightDecay(0.1), dict.fromkeys(arrays, G) | {'V': G[0]},
                   **arrays)
    assert_allclose(changes.pop('W'), -(G + 0.1 * W), rtol=1e-6)
    assert_allclose(changes.pop('V'), -G[0])
    for change in changes.values():
        assert_allclose(change, -G)


@pytest.mark.parametrize('dtype', ['f2', 'f4'])
def test_the_loss_scale_changes_nothing(dtype):
    optimizer = chainer.optimizers.SGD(1.0)
    optimizer.use_fp32_update()
    change = step(WeightDecay(0.1), {'W': G}, optimizer, 1024.0,
                  W=W.astype(dtype))['W']
    assert_allclose(change, -(G + 0.1 * W), rtol=2e-3)


def test_chainers_on_an_update_rule_decays_by_the_loss_scale():
    """Why it cannot be used there, where it could leave out biases."""
    def join(optimizer):
        rule = optimizer.target.W.update_rule
        rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    join.timing, join.call_for_each_param = 'pre', False
    change = step(join, {'W': G}, scale=1024.0, W=W)['W']
    assert_allclose(change, -(G + 1024 * 0.1 * W), rtol=1e-5)


def test_bad_rates_are_errors():
    with pytest.raises(ValueError, match='weight_decay must be a finite'):
        WeightDecay(-1)
