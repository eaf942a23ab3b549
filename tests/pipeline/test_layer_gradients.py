"""Gradients of a layer that has been recorded, beside Chainer's own."""
import tracemalloc

from chainer_fp8pipe.pipeline.gradient_sums import GradientSums

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.pipeline.blocks import record


def gradients_by_chainer(layer, inputs, seeds):
    """The same through Chainer's own backward on one graph."""
    variables = [chainer.Variable(x) for x in inputs]
    outputs = layer(*variables)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(F.sum(y * seed) for y, seed in zip(
        outputs, seeds, strict=True))
    parameters = list(layer.params()) if isinstance(
        layer, chainer.Link) else []
    for parameter in parameters:
        parameter.cleargrad()
    total.backward()
    found = [v.grad for v in variables], [p.grad for p in parameters]
    for parameter in parameters:
        parameter.cleargrad()
    return found


def gradients_by_tape(layer, inputs, seeds, defer):
    parameters = list(layer.params()) if isinstance(
        layer, chainer.Link) else []
    for parameter in parameters:
        parameter.cleargrad()
    sums = GradientSums()
    tape, _ = record(layer, inputs, (True,) * len(inputs))
    found = tape.backward(seeds, sums, defer)
    if defer:
        tape.backward_weight(sums)
    sums.collect(parameters)
    sums.finish(None)
    return found, [parameter.grad for parameter in parameters]


def random(*shape):
    return np.random.RandomState(sum(shape)).randn(*shape).astype('f')


class Block(chainer.Chain):
    """Two uses of one link, and a skip connection."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner = L.Linear(5, 5)

    def forward(self, x):
        return self.inner(F.tanh(self.inner(x))) + x


LAYERS = {
    'linear': (L.Linear(5, 3), [(4, 5)]),
    'linear without bias': (L.Linear(5, 3, nobias=True), [(4, 5)]),
    'convolution': (L.Convolution2D(2, 3, 3), [(4, 2, 6, 6)]),
    'deconvolution': (L.Deconvolution2D(2, 3, 3), [(4, 2, 6, 6)]),
    'batch normalisation': (L.BatchNormalization(5), [(4, 5)]),
    'scale': (L.Scale(W_shape=(5,)), [(4, 5)]),
    'function': (F.tanh, [(4, 5)]),
    'two inputs': (F.add, [(4, 5), (4, 5)]),
    'one input twice': (lambda x: x * x, [(4, 5)]),
    'two outputs': (lambda x: F.split_axis(x, 2, 1), [(4, 6)]),
    'passing on': (lambda x, skip: (F.tanh(x) * skip, skip),
                   [(4, 5), (4, 5)]),
    'identity': (lambda x, y: (y, x), [(4, 5), (4, 3)]),
    'one output twice': (lambda x: (F.tanh(x),) * 2, [(4, 5)]),
    'chain': (Block(), [(4, 5)]),
}


@pytest.mark.parametrize('defer', [False, True])
@pytest.mark.parametrize('name', LAYERS)
def test_gradients_are_those_of_chainers_own_backward(name, defer):
    layer, shapes = LAYERS[name]
    inputs = tuple(random(*shape) for shape in shapes)
    with chainer.using_config('train', True):
        outputs = layer(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seeds = tuple(random(*y.shape) + 1 for y in outputs)
        expected = gradients_by_chainer(layer, inputs, seeds)
        found = gradients_by_tape(layer, inputs, seeds, defer)
    for wanted, got in zip(expected, found, strict=True):
        assert len(wanted) == len(got)
        for one, other in zip(wanted, got, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_a_deferred_weight_gradient_is_not_there_before_its_time():
    layer = L.Linear(5, 3)
    layer.cleargrads()
    sums = GradientSums()
    tape, _ = record(layer, (random(4, 5),), (True,))
    tape.backward((random(4, 3),), sums, defer=True)
    sums.finish(None)
    assert layer.W.grad is None
    tape.backward_weight(sums)
    sums.finish(None)
    assert layer.W.grad is not None


def test_an_output_without_gradient_gives_none_back():
    tape, _ = record(F.tanh, (random(4, 5),), (True,))
    assert tape.backward((None,), GradientSums()) == (None,)


def test_integers_travel_along_without_gradient():
    labels = np.arange(4, dtype='i')
    tape, _ = record(lambda x, t: (F.tanh(x), t), (random(4, 5), labels),
                (True, False))
    assert tape.wants == (True, False)
    gradients = tape.backward((random(4, 5), None), GradientSums())
    assert gradients[0] is not None
    assert gradients[1] is None


def test_nobody_computes_the_gradient_of_an_unwanted_input():
    layer = L.Linear(5, 3)
    tape, _ = record(layer, (random(4, 5),), (False,))
    assert tape.backward((random(4, 3),), GradientSums()) == (None,)


@pytest.mark.parametrize(('returned', 'said'), [
    (None, 'it returned None'), ('text', 'it returned a str'),
    ((np.ones(3, 'f'), None), 'it returned None')])
def test_a_layer_that_returns_something_else_is_an_error(returned, said):
    with pytest.raises(TypeError, match=said):
        record(lambda x: returned, (random(4, 5),), (True,))


def test_function_hooks_see_the_backward_pass():
    layer = L.Linear(5, 3)
    hook = chainer.function_hooks.TimerHook()
    with hook:
        tape, _ = record(layer, (random(4, 5),), (True,))
        before = len(hook.call_history)
        tape.backward((random(4, 3),), GradientSums())
    assert len(hook.call_history) > before


class Handing(chainer.Chain):
    """Hands one of its parameters on to the next layer."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.scale = chainer.Parameter(np.ones(5, 'f'))

    def forward(self, x):
        return x * 2, self.scale


def test_a_parameter_that_is_handed_on_gets_its_gradient():
    layer = Handing()
    layer.cleargrads()
    sums = GradientSums()
    tape, _ = record(layer, (random(4, 5),), (True,))
    assert tape.wants == (True, True)
    for _ in range(2):
        tape, _ = record(layer, (random(4, 5),), (True,))
        tape.backward((random(4, 5), np.arange(5, dtype='f')), sums)
        sums.collect([layer.scale])
    sums.finish(None)
    assert layer.scale.grad.tolist() == [0, 2, 4, 6, 8]


def test_only_what_a_function_retains_is_kept():
    layers = [L.Linear(200, 200), F.relu, L.Linear(200, 200), F.relu]
    tracemalloc.start()
    arrays, wanted, tapes = (random(500, 200),), (True,), []
    before = tracemalloc.get_traced_memory()[0]
    for layer in layers:
        tape, arrays = record(layer, arrays, wanted)
        tapes.append(tape)
        wanted = tape.wants
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # The two outputs of relu; those of the linear layers are gone.
    assert kept < 2.1 * arrays[0].nbytes
    gradient = (random(500, 200),)
    for tape in reversed(tapes):
        gradient = tape.backward(gradient, GradientSums())
    assert gradient[0].shape == (500, 200)


def test_a_variable_that_goes_round_the_layers_is_an_error():
    kept = []

    def keep(x):
        kept.append(F.tanh(x))
        return kept[0] * 2
    record(keep, (random(4, 5),), (True,))
    with pytest.raises(ValueError, match='hand it on from layer to layer'):
        record(lambda x: x + kept[0], (random(4, 5),), (True,))
