"""An interceptor sees its thread's calls of functions and links."""
import threading

from chainer_fp8pipe.intercept.function_calls import (
    Interceptor,
    current,
    intercepting,
    suspended,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest


def in_chainer():
    return (vars(chainer.FunctionNode)['apply'],
            vars(chainer.Link)['__call__'])


ORIGINAL = in_chainer()


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


def test_arguments_by_name_reach_the_interceptor_and_the_link(x):
    class Net(chainer.Link):
        def forward(self, x, *, self_too, link):
            return self_too, link
    recorder = Recorder()
    with intercepting(recorder):
        assert Net()(x, self_too=1, link=2) == (1, 2)
    assert recorder.calls == [('Net', 1, 'self_too', 'link')]


def test_functions_that_backward_calls_are_seen(x):
    x, recorder = chainer.Variable(x), Recorder()
    y = F.sum(x * x)
    with intercepting(recorder):
        y.backward()
    assert recorder.calls
    assert numpy.array_equal(x.grad, [[2, 2]])


@pytest.mark.parametrize(('way', 'calls'), [
    (lambda y: y.backward(), ['backward']),
    (lambda y: chainer.backward([y], [y]), ['backward']),
    (lambda y: chainer.grad([y], [y]), ['backward']),
    (lambda y: y.unchain_backward(), ['unchain'])])
def test_ways_back_are_seen(way, calls):
    recorder = Recorder()
    y = F.sum(chainer.Variable(numpy.ones(2, 'f')))
    with intercepting(recorder):
        way(y)
    assert [call for call in recorder.calls if call in (
        'backward', 'unchain')] == calls


def test_what_the_interceptor_returns_is_the_result(model, x):
    class Other(Interceptor):
        def apply(self, node, inputs, original):
            seen.append(inputs)
            return chainer.Variable(x + 7),

        def call_link(self, link, args, kwargs, original):
            return link, args, kwargs
    seen = []
    with intercepting(Other()):
        assert model[0](x, n_batch_axes=2) == (
            model[0], (x,), {'n_batch_axes': 2})
        assert F.tanh(x).array[0, 0] == 8
    assert len(seen) == 1
    assert seen[0][0] is x


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
    assert in_chainer() == ORIGINAL


def test_the_inner_one_of_nested_blocks_wins(model, x):
    outer, inner = Recorder(), Recorder()
    assert current() is None
    with intercepting(outer):
        with intercepting(inner):
            assert current() is inner
            model[0](x)
        assert current() is outer
        F.tanh(x)
        with suspended():
            assert current() is None
    assert current() is None
    assert inner.calls == LINEAR
    assert outer.calls == ['Tanh']
    assert in_chainer() == ORIGINAL


def test_suspended_calls_are_not_seen(model, x):
    outer, inner = Recorder(), Recorder()
    with intercepting(outer):
        with suspended():
            model(x)
            with intercepting(inner):
                F.tanh(x)
            model(x)
        model[0](x)
    assert outer.calls == LINEAR
    assert inner.calls == ['Tanh']


def test_an_interceptor_may_suspend_itself_to_compute(x):
    class Twice(Recorder):
        def apply(self, node, inputs, original):
            with suspended():
                return tuple(2 * y for y in super().apply(
                    node, inputs, original))
    recorder = Twice()
    with intercepting(recorder):
        y = F.identity(x)
    assert recorder.calls == ['Identity']
    assert y.array[0, 0] == 2


def test_errors_restore(model, x):
    class Failing(Recorder):
        def apply(self, node, inputs, original):
            raise KeyError
    outer = Recorder()
    with intercepting(outer):
        with pytest.raises(KeyError), intercepting(Failing()):
            model(x)
        with pytest.raises(ZeroDivisionError), suspended():
            raise ZeroDivisionError
        F.tanh(x)
    assert outer.calls == ['Tanh']
    assert in_chainer() == ORIGINAL


def test_somebody_elses_patch_made_before_is_the_original(
        model, x, monkeypatch):
    calls, recorder = [], Recorder()
    for owner, name, original in zip(
            (chainer.FunctionNode, chainer.Link), ('apply', '__call__'),
            ORIGINAL, strict=True):
        def theirs(self, *args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(self, *args, **kwargs)
        monkeypatch.setattr(owner, name, theirs)
    with intercepting(recorder):
        model[0](x)
    assert recorder.calls == LINEAR
    assert calls == ['__call__', 'apply']
