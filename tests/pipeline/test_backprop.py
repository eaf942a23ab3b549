"""Passes through graphs, beside Chainer's own."""
from unittest import mock

from chainer_fp8pipe.pipeline.backprop import InParameters, Tape

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

DRAW = numpy.random.RandomState(0)
X = DRAW.randn(3, 4).astype('f')
SEED = DRAW.randn(3, 4).astype('f')

#: Each takes two variables.
FUNCTIONS = (F.add, lambda x, y: x * y, lambda x, y: F.tanh(x),
             lambda x, y: F.concat(F.split_axis(x, 2, 1)[::-1]) - y,
             F.maximum, lambda x, y: F.where(x.array > 0, x, y),
             lambda x, y: x * x)


class Taken:
    """The sums of what was handed over."""

    take_product = None

    def __init__(self):
        self.gradients = {}

    def take(self, parameter, gradient):
        name = parameter.name
        self.gradients[name] = (self.gradients[name] + gradient
                                if name in self.gradients else gradient)


def layers(count=3):
    made = [L.Linear(4, 4, initialW=numpy.random.RandomState(n).randn(4, 4))
            for n in range(count)]
    for number, layer in enumerate(made):
        layer.W.name, layer.b.name = f'W{number}', f'b{number}'
        layer.cleargrads()
    return made


def graph(plan, x, links):
    """A value for each step of a plan; each uses two of the earlier."""
    values = [x]
    for kind, first, second in plan:
        one, other = (values[place % len(values)]
                      for place in (first, second))
        values.append(FUNCTIONS[kind](one, other) if kind < len(FUNCTIONS)
                      else links[kind - len(FUNCTIONS)](one))
    return values[-1] + x


@given(plan=st.lists(st.tuples(
    st.integers(0, len(FUNCTIONS) + 2), st.integers(0, 20),
    st.integers(0, 20)), min_size=1, max_size=12),
    defer=st.booleans(), lazy=st.booleans())
def test_gradients_have_the_bits_of_chainers_own_pass(plan, defer, lazy):
    links, taken = layers(), Taken()
    x, again = chainer.Variable(X), chainer.Variable(X)
    with chainer.using_config('lazy_grad_sum', lazy):
        y, z = (graph(plan, one, links) for one in (x, again))
    chainer.backward([y], [chainer.Variable(SEED)])
    expected = {parameter.name: parameter.grad for link in links
                for parameter in link.params() if parameter.grad is not None}
    tape = Tape((again,), (z,))
    found, = tape.backward((SEED,), taken, defer=defer)
    tape.backward_weight()
    numpy.testing.assert_array_equal(found, x.grad)
    assert taken.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        numpy.testing.assert_array_equal(taken.gradients[name], gradient)


def test_a_gradient_is_handed_over_when_its_function_is_through():
    first, second, third = layers()
    y = second(F.tanh(third(second(first(chainer.Variable(X))))))
    order = []

    class Note(chainer.FunctionHook):
        def backward_preprocess(self, function, in_data, out_grad):
            order.append(function.label)

    class Taking(InParameters):
        @staticmethod
        def take(parameter, gradient):
            order.append(parameter.name)
    with Note():
        Tape((), (y,)).backward((SEED,), Taking)
    assert order == [
        'LinearFunction', 'W1', 'b1', 'Tanh', 'LinearFunction', 'W2', 'b2',
        'LinearFunction', 'W1', 'b1', 'LinearFunction', 'W0', 'b0']


def test_what_can_wait_changes_no_order_of_gradients():
    """Transposed, for an output layer, a weight is not the linear function's.
    """
    link, orders = layers()[0], []
    for defer in False, True:
        h = F.matmul(F.tanh(link(chainer.Variable(X))), F.transpose(link.W))
        found = mock.Mock(take_product=None)
        tape = Tape((), (link(h),))
        tape.backward((SEED,), found, defer=defer)
        assert bool(found.take.call_count) != defer
        tape.backward_weight()
        orders.append([(call.args[0].name, call.args[1].tobytes())
                       for call in found.take.call_args_list])
    assert orders[0] == orders[1]
    assert [name for name, _ in orders[0]] == ['W0', 'b0', 'W0', 'W0', 'b0']


def test_debug_mode_finds_nan():
    y = F.tanh(chainer.Variable(X))
    with chainer.using_config('debug', True), \
            pytest.raises(RuntimeError, match='NaN is detected'):
        Tape((), (y,)).backward((SEED * numpy.float32('nan'),), InParameters)


class Wrong(chainer.FunctionNode):
    def __init__(self, *gradients):
        self._gradients = gradients

    def forward(self, inputs):
        return inputs[0] * 2,

    def backward(self, indexes, gradients):
        return self._gradients


@pytest.mark.parametrize(('gradients', 'error', 'said'), [
    ((chainer.Variable(X[:2]),), ValueError, 'Shape of data and grad'),
    ((chainer.Variable(X.astype('d')),), TypeError, 'Dtype of data and grad'),
    ((None, None), ValueError, 'number of gradients returned .* 2 != ')])
def test_a_wrong_gradient_is_an_error(gradients, error, said):
    y, = Wrong(*gradients).apply((chainer.Variable(X),))
    with pytest.raises(error, match=said):
        Tape((), (y,)).backward((SEED,), InParameters)
