"""An interceptor sees its thread's calls of functions and links."""
import threading

from chainer_fp8pipe.intercept.function_calls import (
    Interceptor,
    creating,
    current,
    hold,
    intercepting,
    suspended,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest


class Recorder(Interceptor):
    """Makes each call, and says which."""

    def __init__(self):
        self.calls = []

    def apply(self, node, inputs, original):
        self.calls.append(type(node).__name__)
        return super().apply(node, inputs, original)

    def before_backward(self, outputs):
        self.calls.append('backward')

    def before_unchain(self, output):
        self.calls.append('unchain')

    def call_link(self, link, args, kwargs, original):
        self.calls.append((type(link).__name__, len(args), *kwargs))
        return super().call_link(link, args, kwargs, original)


LINEAR = [('Linear', 1), 'LinearFunction']


@pytest.fixture
def model():
    return chainer.Sequential(L.Linear(2, 2), F.tanh)


@pytest.fixture
def x():
    return numpy.ones((1, 2), 'f4')


def test_functions_and_links_are_seen_from_the_outside_in(model, x):
    plain, recorder = model(x), Recorder()
    with intercepting(recorder):
        found = model(x)
    assert recorder.calls == [('Sequential', 1), *LINEAR, 'Tanh']
    assert found.array.tobytes() == plain.array.tobytes()
    model(x)
    assert len(recorder.calls) == 4


@pytest.mark.parametrize(('way', 'call'), [
    (lambda y: y.backward(), 'backward'),
    (lambda y: chainer.backward([y], [y]), 'backward'),
    (lambda y: chainer.grad([y], [y]), 'backward'),
    (lambda y: y.unchain_backward(), 'unchain')])
def test_ways_back_are_seen_and_the_functions_that_they_call(way, call, x):
    x, recorder = chainer.Variable(x), Recorder()
    y = F.sum(x * x)
    with intercepting(recorder):
        way(y)
    assert recorder.calls[0] == call
    assert (x.grad is not None) == (len(recorder.calls) > 1)


def test_another_thread_is_unaffected(model, x):
    outer, inner, barrier = Recorder(), Recorder(), threading.Barrier(2)

    def run():
        model(x)
        with intercepting(inner):
            barrier.wait()
            model[0](x)
            barrier.wait()
        model(x)
    thread = threading.Thread(target=run)
    with intercepting(outer):
        thread.start()
        barrier.wait()
        F.tanh(x)
        barrier.wait()
        thread.join()
    assert outer.calls == ['Tanh']
    assert inner.calls == LINEAR


def test_the_innermost_of_nested_blocks_wins_and_errors_end_them(model, x):
    class Failing(Recorder):
        def apply(self, node, inputs, original):
            raise KeyError
    outer, inner = Recorder(), Recorder()
    with intercepting(outer):
        with intercepting(inner):
            assert current() is inner
            model[0](x)
        with pytest.raises(KeyError), intercepting(Failing()):
            model(x)
        with suspended():
            model(x)
            with intercepting(inner):
                F.tanh(x)
            assert current() is None
        F.exp(x)
        assert current() is outer
    assert inner.calls == [*LINEAR, 'Tanh']
    assert outer.calls == ['Exp']


# --- new parameters ----------------------------------------------------------

class Noting(Interceptor):
    """Notes what it is asked."""

    def __init__(self, initializes=False):
        self._initializes, self.shaped = initializes, []

    def initialize(self, parameter, shape):
        self.shaped.append(shape)
        return self._initializes


def test_who_creates_gets_parameters_without_values():
    creation, found = Noting(initializes=True), []
    with creating(creation):
        made = [chainer.Parameter(0, (2, 3)), chainer.Parameter(0)]
        given = chainer.Parameter(numpy.ones(3))
        # Another thread sees nothing of it.
        thread = threading.Thread(target=lambda: found.append(
            chainer.Parameter(0, (2,)).array))
        thread.start()
        thread.join()
    assert creation.shaped == [(2, 3)]
    assert [parameter.array for parameter in made] == [None, None]
    assert given.array.tolist() == [1, 1, 1]
    assert found[0].tolist() == [0, 0]


# --- as_strided --------------------------------------------------------------

def received(values):
    """The same values in the middle of a message, as a receiver has them."""
    wire = numpy.zeros(128 + values.nbytes, numpy.uint8)
    part = wire[64:64 + values.nbytes].view(values.dtype)
    part[...] = values.reshape(-1)
    return part.reshape(values.shape)


VALUES = numpy.arange(6, dtype='f').reshape(2, 3)


@pytest.mark.parametrize(('array', 'offset', 'expected'), [
    *((received(VALUES), offset, F.as_strided(
        VALUES, (4,), (1,), offset).array) for offset in (0, 1, None)),
    (received(VALUES).T, 0, numpy.arange(4)),   # axes as they lie in memory
    (VALUES[1:], 0, numpy.arange(4))])          # a part, as by Chainer
def test_what_came_in_a_message_is_read_as_on_its_sender(
        array, offset, expected):
    owner = Recorder()
    hold(owner)
    found = F.as_strided(array, (4,), (1,), offset).array
    numpy.testing.assert_array_equal(found, expected)
