"""What is atomic is run as one call, and gives what it would otherwise."""
from chainer_fp8pipe import atomic
from chainer_fp8pipe.chains import whole_call
from chainer_fp8pipe.intercept.function_calls import (
    Interceptor,
    intercepting,
    suspended,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

X = numpy.random.RandomState(0).randn(3, 4).astype('f')


class Here(Interceptor):
    """Does everything itself, whole functions as one node."""

    def __init__(self):
        self.nodes = []

    def call_whole(self, function, args, kwargs):
        return whole_call.call_whole(function, args, kwargs, None)

    def apply(self, node, inputs, original):
        self.nodes.append(node.label)
        with suspended():
            return original(node, inputs)


def compared(run, *links):
    """Runs it plainly and as calls; both give the same.

    Returns:
        What was called.
    """
    outcomes = []
    here = Here()
    for interceptor in (None, here):
        x = chainer.Variable(X.copy())
        for link in links:
            link.cleargrads()
        if interceptor is None:
            y = run(x)
        else:
            with intercepting(interceptor):
                y = run(x)
        F.sum(y * y).backward()
        outcomes.append([y.array, x.grad, *(
            parameter.grad for link in links for parameter in link.params())])
    for plain, called in zip(*outcomes, strict=True):
        numpy.testing.assert_allclose(plain, called, 1e-6)
    return here.nodes


@atomic
def clipped(x, *, factor=1):
    if float(abs(x.array).max()) < 100:     # a look
        x = x * (2 * factor)
    return F.tanh(x)


@atomic
def chosen(x, index, table):
    assert isinstance(index, numpy.ndarray)
    return x[index] * table


@atomic
def pair(x):
    return F.exp(x), F.sin(x)


@pytest.mark.parametrize(('run', 'calls'), [
    (lambda x: clipped(x) + 1, ['clipped', '_ + 1']),
    (lambda x: clipped(x, factor=3), ['clipped']),
    (lambda x: chosen(x, numpy.array([2, 0, 2]), numpy.arange(4, dtype='f')),
     ['chosen']),
    (lambda x: pair(x)[1], ['pair'])])      # an output that nobody uses
def test_a_function_that_looks_is_one_call(run, calls):
    assert compared(run) == calls


def test_its_results_have_the_form_that_they_had():
    @atomic
    def several(pair, options):
        left, right = pair
        return {'sum': left + right, 'rest': [left * options['scale'],
                                              right.array, (3, 'text')]}

    def run(x):
        found = several((x, F.exp(x)), {'scale': 2})
        assert isinstance(found['rest'][1], numpy.ndarray)
        assert found['rest'][2] == (3, 'text')
        return found['sum'] + found['rest'][0] * found['rest'][1]
    assert 'several' in compared(run)


def test_a_method_uses_its_links_parameters():
    class Net(chainer.Chain):
        def __init__(self):
            super().__init__(inner=L.Linear(4, 5))

        @atomic
        def gate(self, x):
            y = self.inner(x)
            return y * (1 if y.array.sum() > 0 else 2)

        def forward(self, x):
            return F.relu(self.gate(x))
    net = Net()
    assert compared(net, net) == ['gate', 'ReLU']


def test_without_an_interceptor_it_is_the_function_itself():
    """Its name, its documentation, its exceptions."""
    assert clipped.__name__ == 'clipped'

    @atomic
    def broken(x):
        raise KeyError('from inside')
    with pytest.raises(KeyError, match='from inside'):
        broken(3)
    with intercepting(Here()), pytest.raises(KeyError, match='from inside'):
        broken(chainer.Variable(X))
