"""Calls without checks give what Chainer's own give, bit for bit."""
from chainer_fp8pipe.intercept.function_calls import unchecked

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

DRAW = numpy.random.RandomState(0)
X = DRAW.randn(4, 6).astype('f')
T = numpy.array([0, 5, 2, 1], 'i')
LINK = L.Linear(6, 6, initialW=DRAW.randn(6, 6))
CONVOLUTION = L.Convolution2D(3, 2, 3, initialW=DRAW.randn(2, 3, 3, 3))
NORM = L.BatchNormalization(6)


class Square(chainer.Function):
    """In the old style."""

    def forward(self, inputs):
        return inputs[0] ** 2,

    def backward(self, inputs, gradients):
        return 2 * inputs[0] * gradients[0],


#: From a variable to a loss.
CALLS = {
    'a chain': lambda x: F.sum(F.tanh(LINK(F.relu(x)))),
    'an input twice': lambda x: F.sum(x * x + x),
    'several outputs': lambda x: F.sum(
        F.split_axis(x, 3, 1)[1] * F.split_axis(x, 3, 1)[2]),
    'an unused output': lambda x: F.sum(F.split_axis(x, 2, 1)[0]),
    'an array': lambda x: F.sum(F.where(X > 0, x, F.exp(x))),
    'integers': lambda x: F.softmax_cross_entropy(x, T),
    'statistics of a batch': lambda x: F.sum(NORM(x) ** 3),
    'the old style': lambda x: F.sum(Square()(F.sin(x))),
    'a view': lambda x: F.sum(F.transpose(x)[1:3] ** 2),
    'a convolution': lambda x: F.sum(CONVOLUTION(
        F.reshape(F.pad(x, ((0, 0), (0, 69)), 'constant'), (4, 3, 5, 5)))),
    'a loss of nothing': lambda x: F.sum(F.dropout(x, 0.)),
    'a forgetting function': lambda x: F.sum(F.forget(F.tanh, x)),
    'normalised layers': lambda x: F.sum(F.layer_normalization(
        x, X[0], X[1]) ** 3),
}


def gradients(name):
    """The loss, its rank in the graph, and all gradients."""
    for link in LINK, CONVOLUTION, NORM:
        link.cleargrads()
    x = chainer.Variable(X.copy())
    loss = CALLS[name](x)
    found = [loss.array, loss.node.rank]
    loss.backward()
    return [*found, x.grad, *(
        parameter.grad for link in (LINK, CONVOLUTION, NORM)
        for _, parameter in sorted(link.namedparams()))]


@pytest.mark.parametrize('name', CALLS)
def test_losses_and_gradients_have_the_same_bits(name):
    expected = gradients(name)
    with unchecked():
        found = gradients(name)
    for one, other in zip(found, expected, strict=True):
        numpy.testing.assert_array_equal(one, other)


def test_a_second_derivative_is_that_of_chainer():
    def second():
        x = chainer.Variable(X)
        first, = chainer.grad([F.sum(F.tanh(x) ** 2)], [x],
                              enable_double_backprop=True)
        return chainer.grad([F.sum(first ** 2)], [x])[0].array
    expected = second()
    with unchecked():
        numpy.testing.assert_array_equal(second(), expected)


class Hook(chainer.FunctionHook):
    name = 'hook of a test'

    def __init__(self):
        self.seen = []

    def forward_postprocess(self, function, in_data):
        self.seen.append(function.label)


def test_hooks_see_the_calls_and_debug_mode_finds_nan():
    function = chainer.functions.activation.tanh.Tanh()
    with unchecked(), Hook() as hook:
        F.exp(X)
    function.add_hook(hook)         # of one function
    with unchecked():
        function.apply((X,))
    assert hook.seen == ['exp', 'Tanh']
    with unchecked(), chainer.using_config('debug', True), \
            numpy.errstate(invalid='ignore'), \
            pytest.raises(RuntimeError, match='NaN is detected'):
        F.log(-abs(X))


@pytest.mark.parametrize(('returned', 'error', 'said'), [
    ([X], TypeError, 'must return a tuple, not list'),
    ((1.5,), TypeError, 'float')])
def test_a_forward_that_returns_something_else_is_an_error(
        returned, error, said):
    class Wrong(chainer.FunctionNode):
        def forward(self, inputs):
            return returned
    with unchecked(), pytest.raises(error, match=said):
        Wrong().apply((X,))
