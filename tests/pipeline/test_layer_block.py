"""One layer of a Divisible as a block: what it computes and what it draws."""
import contextlib
import functools

from chainer_fp8pipe.pipeline.gradient_sums import GradientSums
from chainer_fp8pipe.pipeline.layer_block import LayerBlock
from chainer_fp8pipe.pipeline.randomness import Place

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

PLACE = Place(0, 0, 0, 0)
X = numpy.random.RandomState(0).randn(4, 5).astype('f')
dropout = functools.partial(F.dropout, ratio=.5)


def recorded(layer, *inputs, place=PLACE, wanted=None, **options):
    """What a block of this layer keeps and gives, with its outputs."""
    return LayerBlock((3, layer), **options).record(
        0, inputs, wanted, place)


class Swapping(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(5, 5)

    def forward(self, x, y):
        return F.tanh(self.linear(y)), x


@pytest.mark.parametrize(('layer', 'inputs'), [
    (L.Linear(5, 3), (X,)), (F.tanh, (X,)), (Swapping(), (X, X + 1)),
    (L.BatchNormalization(5), (X,))])
def test_outputs_are_the_layers_with_and_without_a_way_back(layer, inputs):
    expected = layer(*map(chainer.Variable, inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    _, found = recorded(layer, *inputs)
    without = LayerBlock((3, layer)).infer(0, inputs, PLACE)
    for one, other, wanted in zip(found, without, expected, strict=True):
        numpy.testing.assert_array_equal(one, wanted.array)
        numpy.testing.assert_array_equal(other, wanted.array)


@pytest.mark.parametrize(('first', 'wanted', 'has'), [
    (False, None, True), (True, None, False), (True, (True,), True),
    (False, (False,), False)])
def test_nobody_gets_a_gradient_that_nobody_wants(first, wanted, has):
    tape, (y,) = recorded(F.tanh, X, first=first, wanted=wanted)
    gradient, = tape.backward((numpy.ones_like(y),), GradientSums())
    assert (gradient is not None) == has


def test_integers_have_no_gradient():
    layer = L.EmbedID(7, 3)
    layer.cleargrads()
    sums = GradientSums()
    tape, (y,) = recorded(layer, numpy.array([1, 6, 1], 'i'))
    assert tape.backward((numpy.ones_like(y),), sums) == (None,)
    sums.collect(list(layer.params()))
    sums.finish(None)
    assert layer.W.grad.sum(axis=1).tolist() == [0, 6, 0, 0, 0, 0, 3]


def test_what_is_drawn_depends_on_the_place_alone():
    def mask(place):
        numpy.random.rand(numpy.random.randint(9))      # whatever was before
        _, (y,) = recorded(dropout, numpy.ones((9, 9), 'f'), place=place)
        return y.tobytes()
    places = [PLACE, PLACE._replace(seed=1), PLACE._replace(iteration=1),
              PLACE._replace(first_sample=2)]
    assert len({mask(place) for place in places}) == 4
    assert mask(places[3]) == mask(places[3])
    # The layer is the block's own.
    assert mask(PLACE._replace(layer=1)) == mask(PLACE)


def test_two_layers_of_a_kind_draw_differently():
    one, other = (LayerBlock((layer, dropout)).infer(
        0, (numpy.ones((9, 9), 'f'),), PLACE)[0] for layer in (0, 1))
    assert one.tobytes() != other.tobytes()


def test_initial_values_are_the_same_on_every_replica():
    """Whose micro-batches begin with other samples."""
    drawn = []
    for seed, first_sample in ((5, 0), (5, 8), (6, 0)):
        layer = L.Linear(None, 3)
        recorded(layer, X, place=PLACE._replace(first_sample=first_sample),
                 initial_seed=seed)
        drawn.append(layer.W.array.tobytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_layer_that_draws_nothing_leaves_the_generator_alone():
    """To seed costs as much as a small layer; the first call still does."""
    block = LayerBlock((3, L.Linear(5, 3)))
    block.infer(0, (X,), PLACE)
    before = numpy.random.get_state()[1].tobytes()
    block.infer(1, (X,), PLACE._replace(first_sample=4))
    assert numpy.random.get_state()[1].tobytes() == before


@pytest.mark.parametrize('kind', ['of the layer', 'of links', 'of functions'])
def test_hooks_that_are_added_later_draw_by_the_place(kind):
    drawn = []

    class OfLinks(chainer.LinkHook):
        name = 'drawing'

        def forward_preprocess(self, args):
            drawn.append(numpy.random.rand())

    class OfFunctions(chainer.FunctionHook):
        name = 'drawing'

        def forward_preprocess(self, function, inputs):
            drawn.append(numpy.random.rand())
    layer = L.Linear(5, 3)
    block = LayerBlock((3, layer))
    block.infer(0, (X,), PLACE)         # without hooks, once
    hook = OfFunctions() if kind == 'of functions' else OfLinks()
    if kind == 'of the layer':
        layer.add_hook(hook)
    with contextlib.nullcontext() if kind == 'of the layer' else hook:
        for seed in (1, 2):
            numpy.random.seed(seed)
            block.infer(0, (X,), PLACE)
            block.infer(0, (X,), PLACE._replace(iteration=1))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_a_link_shows_what_it_has_and_a_function_nothing():
    layer = Swapping()
    block = LayerBlock((3, layer))
    assert [*block.params()] == [*layer.params()]
    assert [*block.links()] == [layer, layer.linear]
    assert block.name == 'layer 3 (Swapping)'
    block = LayerBlock((4, F.tanh))
    assert [*block.params(), *block.links()] == []
