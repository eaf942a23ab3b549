"""A forward pass is compared with a trace without doing any of it."""
from types import SimpleNamespace

from chainer_fp8pipe import atomic
from chainer_fp8pipe.chains.names import Names
from chainer_fp8pipe.chains.recorder import Tracer
from chainer_fp8pipe.chains.replay import (
    Diverged,
    MicroBatch,
    Rehearsal,
    rehearse,
)
from chainer_fp8pipe.intercept.function_calls import intercepting
from chainer_fp8pipe.pipeline.stage import weights_of

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models import MODELS


def traced(model, *args):
    """A model's trace, and the names in it."""
    names = Names(model)
    return Tracer(names).trace(
        lambda: model(*args), timed=False), names


def compared(model, trace, names, args):
    """What a rehearsal finds, against a trace."""
    rehearsal = Rehearsal(trace, names)
    with intercepting(rehearsal):
        result = model(*args)
        rehearsal.finish()
    assert result is trace.result
    return rehearsal


def rehearsed(model, example, batch):
    """What a rehearsal of a batch finds, against the trace of an example."""
    return compared(model, *traced(model, *example), batch)


def batch(name, seed, samples=4):
    return MODELS[name].batch(numpy.random.RandomState(seed), samples)


def test_another_batch_of_the_same_lengths_fits_and_no_other():
    model = MODELS['n_step_bigru_crf'].make()
    words, tags, lengths = batch('n_step_bigru_crf', 0)
    rehearsed(model, (words, tags, lengths), (words[::-1], tags, lengths))
    with pytest.raises(Diverged):
        rehearsed(model, (words, tags, lengths),
                  (words, tags, (lengths + 1) % 7))


def test_a_tree_of_another_shape_does_not_fit():
    model = MODELS['tree_lstm'].make()
    example, other = batch('tree_lstm', 0), batch('tree_lstm', 1)
    rehearsed(model, example, (other[0], example[1], example[2]))
    with pytest.raises(Diverged):
        rehearsed(model, example, other)


class Coin(chainer.Chain):
    def __init__(self):
        super().__init__(one=L.Linear(3, 3), two=L.Linear(3, 3))
        self.heads = True

    def forward(self, x):
        h = self.one(x)
        return F.sum(self.change(h))


@atomic
def positive(h):
    return h if h.array.any() else -h


@atomic
def negative(h):
    return -h if h.array.any() else h


class Part(chainer.FunctionNode):
    """Some of the samples, times a factor."""

    def __init__(self, share, factor=1.):
        self.share, self.factor = share, factor

    def forward(self, inputs):
        x, = inputs
        return self.factor * x[:int(len(x) * self.share)],


CHANGES = {
    'another marked function': lambda net, h: (
        positive if net.heads else negative)(h),
    'another function to forget': lambda net, h: F.forget(
        F.relu if net.heads else F.tanh, h),
    'a function more': lambda net, h: F.relu(h) if net.heads else h,
    'a function less': lambda net, h: h if net.heads else F.relu(h),
    'another function': lambda net, h: (
        F.relu if net.heads else F.tanh)(h),
    'another link': lambda net, h: (net.one if net.heads else net.two)(h),
    'another option': lambda net, h: F.sum(h, int(net.heads)),
    'a number that cuts': lambda net, h: Part(
        .5 if net.heads else .75).apply((h,))[0],
    'another index': lambda net, h: h[:, :1 if net.heads else 2],
    'another input': lambda net, h: F.relu(
        h) + (h if net.heads else F.tanh(h) * 0),
    'another order': lambda net, h: F.concat(
        [h, h * 2] if net.heads else [h * 2, h]),
    'another shape': lambda net, h: F.broadcast_to(
        F.sum(h), (2,) if net.heads else (3,)),
    'an array of another shape': lambda net, h: h * numpy.ones(
        (4, 3) if net.heads else (1, 3), 'f'),
    'another split': lambda net, h: F.split_axis(
        h, numpy.array([1 if net.heads else 2]), 1)[0],
    'another padding': lambda net, h: F.pad(
        h, numpy.array([[0, 0], [0, 1 if net.heads else 2]]), 'constant'),
    'no axis': lambda net, h: F.sum(h, axis=None if net.heads else 0),
    'True, which equals 1': lambda net, h: h[True if net.heads else 1],
    'numbers of NumPy': lambda net, h: h[
        :, :numpy.int64(1 if net.heads else 2)],
    'another type': lambda net, h: F.cast(
        h, numpy.float16 if net.heads else numpy.float64),
    'more conditions that hold': lambda net, h: h[
        numpy.arange(4) > (1 if net.heads else 2)],
    'conditions in a list': lambda net, h: h[
        [[True, not net.heads, False, True]]],
    'more places': lambda net, h: h[
        :, numpy.arange(1 if net.heads else 2)],
    'an array for a slice': lambda net, h: h[
        slice(0, 3) if net.heads else numpy.arange(3)],
}
#: Where only values differ that no shape depends on.
VALUES = {
    'places': lambda net, h: h[numpy.array([0, 2] if net.heads else [1, 1])],
    'places in a list': lambda net, h: h[[[0, 2] if net.heads else [1, 1]]],
    'as many conditions': lambda net, h: h[
        numpy.arange(4) > 2 if net.heads else numpy.arange(4) < 1],
    'order': lambda net, h: F.permutate(h, numpy.array(
        [0, 1, 2, 3] if net.heads else [3, 2, 1, 0], 'i')),
    'labels': lambda net, h: F.softmax_cross_entropy(
        h, numpy.full(4, int(net.heads), 'i')),
    'mask': lambda net, h: F.where(numpy.full((4, 3), net.heads), h, -h),
    'dropped': lambda net, h: F.dropout(
        h, mask=numpy.full((4, 3), net.heads)),
    'a factor': lambda net, h: h * (1.5 if net.heads else 2.5),
    'an integer as a factor': lambda net, h: h * (2 if net.heads else 3.5),
    'a factor of NumPy': lambda net, h: h * numpy.float32(
        1.5 if net.heads else 2.5),
    'a ratio': lambda net, h: F.dropout(h, .1 if net.heads else .2),
    "a user's factor": lambda net, h: Part(1., 1.5 if net.heads else 2.5)
        .apply((h,))[0],
    'no number': lambda net, h: h * float('nan'),
    'weights': lambda net, h: h * numpy.full(3, float(net.heads), 'f'),
}


@pytest.mark.parametrize('name', CHANGES)
def test_other_calls_do_not_fit(name):
    net = Coin()
    net.change = lambda h: CHANGES[name](net, h)
    x = (numpy.ones((4, 3), 'f'),)
    trace = traced(net, *x)
    compared(net, *trace, x)
    net.heads = False
    with pytest.raises(Diverged):
        compared(net, *trace, x)


@pytest.mark.parametrize('name', VALUES)
def test_values_that_no_shape_depends_on_fit(name):
    """A batch of other labels does not make a new trace."""
    net = Coin()
    net.change = lambda h: VALUES[name](net, h)
    x = (numpy.ones((4, 3), 'f'),)
    trace = traced(net, *x)
    net.heads = False
    compared(net, *trace, x)


def test_what_a_rehearsal_reports_that_fails_is_forgotten():
    net = Coin()
    net.change = lambda h: chainer.report(
        {'heads' if net.heads else 'tails': 1}, net) or (
            F.relu if net.heads else F.tanh)(h)
    x = numpy.ones((4, 3), 'f')
    trace, names = traced(net, x)
    program = SimpleNamespace(trace=trace, attributes=frozenset(),
                              put_state=lambda *_: None)
    found = []
    for net.heads in (True, False, True):
        found.append(rehearse(program, MicroBatch(net, (x,), {}), names).fits)
        assert not names.reporter.observation
    assert found == [True, False, True]


def test_labels_that_count_are_counted():
    model = L.Classifier(L.Linear(3, 5))
    x, t = numpy.ones((4, 3), 'f'), numpy.array([1, -1, -1, 2], 'i')
    found = rehearsed(model, (x, numpy.zeros(4, 'i')), (x, t))
    # The loss; accuracy leaves nothing out.
    assert found.labels[0] == (2, 2)
    assert weights_of([found.labels, [(4, 0)] * len(found.labels)],
                      [4, 4]) != [4, 4]


def test_each_forward_pass_may_write_to_the_batch():
    def halve(x, several):
        x /= 2
        several['y'] += 1
        del several['y']
        return x
    given = numpy.ones(2), {'y': numpy.ones(3)}
    call = MicroBatch(halve, given[:1], {'several': given[1]})
    assert [call().tolist() for _ in range(2)] == [[.5, .5]] * 2
    assert given[0].tolist() == [1, 1]
    assert given[1]['y'].tolist() == [1, 1, 1]
