"""Times of calls keep nothing of what they time."""
import weakref

from chainer_fp8pipe.chains.profiling.laps import Laps
from chainer_fp8pipe.pipeline.backprop import Backprop

import chainer
import chainer.functions as F
import numpy


def test_a_call_without_a_backward_pass_keeps_no_graph():
    laps = Laps(chainer.get_device('@numpy'))
    x = chainer.Variable(numpy.ones(3, 'f'))
    loss = F.sum(F.tanh(x))
    reported = F.exp(loss)      # as a perplexity, without a way back
    kept = weakref.ref(loss.creator_node)
    for number, value in enumerate((loss, reported)):
        laps.forward(number, value.creator_node)
    Backprop({}, lambda *_: None, clock=laps).run(
        {loss.node: numpy.ones_like(loss.array)})
    assert laps.medians()[0][1] > 0
    assert laps.medians()[1][1] == 0
    del loss, reported, value
    assert kept() is None


def test_weights_that_wait_are_times_of_the_same_call():
    laps, now = Laps(chainer.get_device('@numpy')), iter(range(100))
    laps._now = lambda: next(now)
    x = chainer.Variable(numpy.ones((2, 3), 'f'))
    link = chainer.links.Linear(3, 3)
    y = link(x)
    laps.start()
    laps.forward(7, y.creator_node)
    backprop = Backprop({}, lambda *_: None, defer=True, clock=laps)
    backprop.run({y.node: numpy.ones_like(y.array)})
    assert laps.medians() == {7: (1, 1)}
    backprop.weights()
    assert laps.medians() == {7: (1, 2)}
