"""What is atomic is run as one call, and gives what it would otherwise."""
from chainer_fp8pipe import atomic
from chainer_fp8pipe.chains.attributes import Names
from chainer_fp8pipe.chains.recorder import Recorder, record_example

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models.judge import Both
from tests.ranks import on_ranks

X = numpy.random.RandomState(0).randn(8, 4).astype('f')


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
def several(pair, options):
    left, right = pair
    return {'sum': left + right, 'rest': [left * options['scale'],
                                          right.array, (3, 'text')]}


def formed(net, x):
    """Results have the form that they had."""
    found = several((x, F.exp(x)), {'scale': 2})
    assert isinstance(found['rest'][1], numpy.ndarray)
    assert found['rest'][2] == (3, 'text')
    return found['sum'] + found['rest'][0] * found['rest'][1]


@atomic
def gate(net, x):
    """Uses a parameter of the model's."""
    y = net.inner(x)
    return y * (1 if y.array.sum() > 0 else 2)


class Net(chainer.Chain):
    def __init__(self, between):
        super().__init__(one=L.Linear(4, 4), inner=L.Linear(4, 4),
                         two=L.Linear(4, 3))
        self.between = between

    def forward(self, x):
        return F.mean(self.two(self.between(self, self.one(x))) ** 2)


CASES = {
    'clipped': lambda net, x: clipped(x, factor=3) + 1,
    'chosen': lambda net, x: chosen(x, numpy.array([2, 0, 2]),
                                    numpy.arange(4, dtype='f')),
    'several': formed, 'gate': lambda net, x: F.relu(gate(net, x)),
    # An output that nobody uses.
    'exp': lambda net, x: atomic(lambda x: (F.exp(x), F.sin(x)))(x)[1]}


@on_ranks(2)
def test_a_function_that_looks_is_one_call(comm):
    for name, between in CASES.items():
        numpy.random.seed(0)
        net = Net(between)
        found = [call.name for call in record_example(
            Recorder(Names(net)), lambda net=net: net(X), False).calls]
        assert ('<lambda>' if name == 'exp' else name) in found
        Both(comm, net, (X,)).update()


def test_outside_of_a_partition_it_is_the_function_itself():
    """Its name, its documentation, its exceptions."""
    assert clipped.__name__ == 'clipped'

    @atomic
    def broken(x):
        raise KeyError('from inside')
    with pytest.raises(KeyError, match='from inside'):
        broken(3)
    with pytest.raises(KeyError, match='from inside'):
        record_example(Recorder(Names(Net(None))), lambda: broken(
            chainer.Variable(X)), False)
