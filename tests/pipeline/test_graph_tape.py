"""The way back through any graph is Chainer's, cut out of a larger one."""
from chainer_fp8pipe.pipeline.backprop import GradientSums, Tape

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

DRAW = numpy.random.RandomState(0)
X, Y = (DRAW.randn(3, 4).astype('f') for _ in range(2))
LINK = L.Linear(4, 4, initialW=DRAW.randn(4, 4), initial_bias=.1)

#: From two inputs to some outputs.
GRAPHS = {
    'a chain': lambda x, y: (F.tanh(LINK(x)) * y,),
    'two outputs': lambda x, y: (F.exp(x), F.sin(y)),
    'one of another': lambda x, y: (lambda h: (h, F.tanh(h)))(LINK(x) + y),
    'an input itself': lambda x, y: (x, LINK(y)),
    'an input twice': lambda x, y: (x, x * y, x),
    'an output twice': lambda x, y: (lambda h: (h, h))(LINK(x * y)),
    'a parameter itself': lambda x, y: (LINK.W, LINK(x) + y),
    'an unused input': lambda x, y: (LINK(LINK(x)),),
    'no graph': lambda x, y: (y, x),
    'an integer': lambda x, y: (F.tanh(x), F.argmax(y, axis=1)),
}


def tape_gradients(make, seeds):
    x, y = chainer.Variable(X), chainer.Variable(Y)
    outputs = make(x, y)
    LINK.cleargrads()
    tape = Tape((x, y), outputs)
    sums = GradientSums()
    del outputs
    found = tape.backward(seeds, sums.take, sums.take_product)
    tape.backward_weight()
    sums.finish(None)
    return [*found, LINK.W.grad, LINK.b.grad]


def plain_gradients(make, seeds):
    x, y = chainer.Variable(X), chainer.Variable(Y)
    outputs = make(x, y)
    LINK.cleargrads()
    total = 0
    for output, seed in zip(outputs, seeds, strict=True):
        if seed is not None:
            total += F.sum(output * seed)
    if isinstance(total, chainer.Variable):
        total.backward()
    return [x.grad, y.grad, LINK.W.grad, LINK.b.grad]


def seed(output, number):
    return numpy.random.RandomState(number).randn(
        *output.shape).astype('f')


@pytest.mark.parametrize('left_out', [None, 0])
@pytest.mark.parametrize('name', GRAPHS)
def test_gradients_are_those_of_the_whole_graph(name, left_out):
    """Also where nobody wants the first output's."""
    make = GRAPHS[name]
    shapes = make(chainer.Variable(X), chainer.Variable(Y))
    seeds = tuple(seed(output, number) if output.dtype.kind == 'f'
                  and number != left_out else None
                  for number, output in enumerate(shapes))
    found = tape_gradients(make, seeds)
    for one, other in zip(found, plain_gradients(make, seeds), strict=True):
        if other is None or not other.any():
            assert one is None or not one.any()
        else:
            numpy.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_inputs_that_want_nothing_get_nothing():
    x = chainer.Variable(X)
    y = chainer.Variable(Y, requires_grad=False)
    first, second = Tape((x, y), (x * y, y)).backward(
        (numpy.ones_like(X), None), None)
    numpy.testing.assert_array_equal(first, Y)
    assert second is None
