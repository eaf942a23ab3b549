from chainer_fp8pipe.links import Divisible, Dropout, lazy
from chainer_fp8pipe.links.divisible.measurement import measure
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

X = np.ones((2, 3), np.float32)


class Watched(chainer.Link):
    """Says what was done with it."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        with self.init_scope():
            self.w = chainer.Parameter(np.ones(3, np.float32))

    def __deepcopy__(self, memo):
        return Watched(self.log)

    def forward(self, x):
        self.log.append(('forward', chainer.config.train, x.requires_grad))
        y = F.scale(x, self.w)
        y.node.creator_node.add_hook(self.Backward(self.log))
        return y

    class Backward(chainer.FunctionHook):
        name = 'watched'

        def __init__(self, log):
            self.log = log

        def backward_postprocess(self, function, inputs, gradients):
            self.log.append('backward')


def test_each_layer_runs_forward_and_backward_as_in_training():
    first, second = [], []
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = measure(Divisible(Watched(first), Watched(second)), X, True)
    # Once before the time is taken, then three times.
    assert first == [('forward', True, False), 'backward'] * 4
    assert second == [('forward', True, True), 'backward'] * 4
    assert [one.parameters for one in found] == [3, 3]
    assert all(one.seconds > 0 for one in found)


def test_forward_alone_is_enough_to_count():
    log = []
    assert measure(Divisible(Watched(log)), X, False) == [(3, 0.0)]
    assert log == [('forward', True, False)]


def test_any_layers_can_be_measured():
    inner = Divisible(lazy(L.Linear, 3, 3))
    model = Divisible(
        lambda x: (x, x), lambda x, y: x + y, lazy(L.Linear, None, 3),
        inner, L.BatchNormalization(3), Dropout(0.5), F.argmax,
        lambda x: x.array, lambda x: x.reshape(1, 1).array)
    found = measure(model, (X,), True)
    assert [one.parameters for one in found] == [0, 0, 12, 12, 6, 0, 0, 0, 0]
    assert model[4].avg_mean.tolist() == [0, 0, 0]
    assert [p.grad for p in model[4].params()
            if not np.isnan(p.grad).all()] == []


def test_several_inputs_are_given_together():
    model = Divisible(lambda x, y: x + y)
    assert len(measure(model, (X, X), True)) == 1


def fails(x):
    raise KeyError('no')


def test_a_layer_that_fails_is_named():
    with pytest.raises(LayerError, match=r'layer 1 \(fails\).*KeyError'):
        measure(Divisible(F.relu, fails), X, True)
    with pytest.raises(LayerError, match=r'layer 0 \(<lambda>\).*None'):
        measure(Divisible(lambda x: None), X, True)
    with pytest.raises(ValueError, match='example=x'):
        measure(Divisible(F.relu), None, True)
