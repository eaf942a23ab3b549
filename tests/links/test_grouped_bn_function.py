from chainer_fp8pipe.links import channel_sums
from chainer_fp8pipe.links.grouped_bn_function import (
    GroupedBatchNormalizationFunction,
    join,
    refusal,
)

import chainer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .groups import Threads, assert_close, parts, reference


def told(x):
    """What a rank with this part of a batch, (samples, channels), tells."""
    mean = x.mean(0) if len(x) else np.zeros(x.shape[1])
    return np.concatenate([[len(x)], mean, ((x - mean) ** 2).sum(0)])


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
       st.sampled_from([0, 1e4, -1e8]), st.integers(0, 99))
def test_parts_have_the_mean_and_variance_of_the_whole(sizes, centre, seed):
    x = np.random.RandomState(seed).randn(sum(sizes), 3) + centre
    whole = join(np.array([told(x[part]) for part in parts(sizes)]))
    assert whole.elements == len(x)
    np.testing.assert_allclose(whole.mean, x.mean(0), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(
        whole.variance, x.var(0), rtol=1e-14 * (1 + abs(centre)),
        atol=1e-14)


def test_a_rank_that_refuses_is_named():
    rows = [told(np.ones((2, 3))), refusal(3), refusal(3)]
    with pytest.raises(ValueError, match='failed on rank 1, 2 of the group'):
        join(np.array(rows))
    with pytest.raises(ValueError, match='no rank of the group has a sample'):
        join(np.array([told(np.ones((0, 3)))] * 2))


@pytest.mark.parametrize(('shape', 'axis'), [
    ((30000, 2), (0,)), ((70, 3, 40, 25), (0, 2, 3)), ((2, 3, 300, 200), None),
    ((9, 7, 40, 50), (0, 2))])
@pytest.mark.parametrize('block', [1, 1000, 1 << 16, 1 << 30])
def test_blocks_change_nothing(monkeypatch, shape, axis, block):
    monkeypatch.setattr(channel_sums, '_BLOCK', block)
    random = np.random.RandomState(0)
    x = (random.randn(*shape) + 50).astype('f')
    gy = (random.randn(*shape) + 1).astype('f')
    axes = axis or (0, 2, 3)
    lengths = [length for number, length in enumerate(shape)
                if number not in axes]
    gamma, beta = random.randn(2, *lengths).astype('f')
    inputs = [chainer.Variable(item) for item in (x, gamma, beta)]
    y, = GroupedBatchNormalizationFunction(_Alone(), axis=axis).apply(inputs)
    y.grad = gy
    y.backward()
    wanted = reference(x, gamma, beta, gy, axes)
    assert_close(y.array, wanted['y'])
    assert_close(inputs[0].grad, wanted['gx'], largest=wanted['terms'])
    assert_close(inputs[1].grad, wanted['ggamma'],
                 largest=np.abs(wanted['gbeta']).max())
    assert_close(inputs[2].grad, wanted['gbeta'])


class _Alone(Threads):
    rank = 0

    def __init__(self):
        super().__init__(1)


def test_an_input_need_not_be_contiguous():
    random = np.random.RandomState(0)
    x = random.randn(4, 5, 6, 3).astype('f').transpose(0, 3, 1, 2)[:, :, ::2]
    gamma, beta = random.randn(2, 3).astype('f')
    variable = chainer.Variable(x)
    y, = GroupedBatchNormalizationFunction(
        _Alone()).apply((variable, gamma, beta))
    y.grad = gy = random.randn(*x.shape).astype('f')
    y.backward()
    wanted = reference(x, gamma, beta, gy, (0, 2, 3))
    assert_close(y.array, wanted['y'])
    assert_close(variable.grad, wanted['gx'])
