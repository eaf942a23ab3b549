import functools
import itertools
import weakref

from chainer_fp8pipe.pipeline.batch_statistics import BatchStatistics
from chainer_fp8pipe.pipeline.chunk import Chunk
from chainer_fp8pipe.pipeline.gradient_sums import GradientSums
from chainer_fp8pipe.pipeline.layers import LayerError, layer_name
from chainer_fp8pipe.pipeline.randomness import Place, current

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.pipeline.blocks import LayerBlock

PLACE = Place(0, 0, 0, 0)


def make(*layers, recompute=False, first=True, start=0):
    parameters = [parameter for layer in layers
                  if isinstance(layer, chainer.Link)
                  for parameter in layer.params()]
    for parameter in parameters:
        parameter.cleargrad()
    sums = GradientSums()
    chunk = Chunk([LayerBlock(layer, first=first and not number)
                   for number, layer in enumerate(enumerate(layers, start))],
                  recompute=recompute, sums=sums,
                  statistics=BatchStatistics(), parameters=parameters)
    return chunk, sums


def ones(*shape):
    return np.ones(shape, 'f')


@pytest.mark.parametrize('recompute', [False, True])
def test_what_backward_has_done_with_is_not_kept(recompute):
    chunk, _ = make(L.Linear(3, 3), F.relu, recompute=recompute)
    for number in range(3):
        chunk.forward(number, (ones(2, 3),), PLACE)
    lives = [chunk.live]
    for number in range(3):
        chunk.restore(number)
        chunk.backward(number, (ones(2, 3),))
        lives.append(chunk.live)
    assert lives == [3, 2, 1, 0]


def test_a_deferred_weight_gradient_keeps_its_micro_batch():
    layer = L.Linear(3, 3)
    chunk, sums = make(layer)
    chunk.forward(0, (ones(2, 3),), PLACE)
    chunk.backward(0, (ones(2, 3),), defer=True)
    assert chunk.live == 1
    chunk.backward_weight(0)
    assert chunk.live == 0
    sums.finish(None)
    assert layer.W.grad.tolist() == [[2.0] * 3] * 3


def test_the_first_chunk_gives_no_gradient_of_its_input():
    for first in (True, False):
        chunk, _ = make(L.Linear(3, 3), first=first)
        chunk.forward(0, (ones(2, 3),), PLACE)
        (gradient,) = chunk.backward(0, (ones(2, 3),))
        assert (gradient is None) == first


def test_layers_know_where_they_run():
    seen = []

    def spy(x):
        seen.append(current())
        return x
    chunk, _ = make(spy, spy, start=4, recompute=True)
    place = Place(1, 2, 0, 3)
    chunk.forward(0, (ones(2, 3),), place)
    chunk.restore(0)
    assert seen == [place._replace(layer=layer) for layer in (4, 5, 4, 5)]


def test_masks_are_the_same_when_forward_is_repeated():
    masks = []

    def dropout(h):
        kept = F.dropout(h)
        masks.append(kept.array != 0)
        return kept
    chunk, _ = make(L.Linear(8, 8), dropout, recompute=True)
    chunk.forward(0, (ones(4, 8),), PLACE)
    np.random.seed(123)         # whatever is drawn between
    chunk.restore(0)
    chunk.backward(0, (ones(4, 8),))
    assert np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize('recompute', [False, True])
def test_an_error_names_the_layer_and_the_micro_batch(recompute):
    def broken(x):
        raise KeyError('missing')
    chunk, _ = make(F.relu, broken, start=7, recompute=recompute)
    with pytest.raises(LayerError, match=r"layer 8 \(broken\), micro-batch "
                                         r"2: KeyError: 'missing'"):
        chunk.forward(2, (ones(2, 3),), PLACE)


@pytest.mark.parametrize(('layer', 'name'), [
    (L.Linear(2, 2), 'layer 3 (Linear)'), (F.relu, 'layer 3 (relu)'),
    (functools.partial(F.dropout, ratio=0.1), 'layer 3 (dropout)'),
    (lambda x: x, 'layer 3 (<lambda>)')])
def test_layers_are_called_by_what_they_are(layer, name):
    assert layer_name(3, layer) == name


def test_spectral_normalisation_cannot_be_recomputed():
    layer = L.Linear(3, 3).add_hook(
        chainer.link_hooks.SpectralNormalization())
    chunk, _ = make(layer, recompute=True)
    with pytest.raises(LayerError, match=r'layer 0 \(Linear\) has spectral'):
        chunk.forward(0, (ones(2, 3),), PLACE)


def test_batch_renormalisation_cannot_be_recomputed():
    chunk, _ = make(L.BatchRenormalization(3), recompute=True)
    with pytest.raises(LayerError, match=r'has batch renormalisation, which'):
        chunk.forward(0, (ones(2, 3),), PLACE)


def test_what_another_stage_runs_does_not_keep_this_one_from_it(monkeypatch):
    """A stage of a Chain knows the links of the whole model."""
    chunk, _ = make(L.Linear(3, 3), recompute=True)
    block, = chunk.blocks
    monkeypatch.setattr(block, 'links', lambda: [
        L.BatchRenormalization(3), *type(block).links(block)])
    chunk.forward(0, (ones(2, 3),), PLACE)
    chunk.restore(0)
    gradient, = chunk.backward(0, (ones(2, 3),))
    assert gradient is None         # of the batch
    assert chunk.live == 0


class Drawing(chainer.LinkHook):
    def __init__(self):
        self.drawn = []

    def forward_preprocess(self, args):
        self.drawn.append(np.random.rand())


@pytest.mark.parametrize('local', [False, True])
def test_what_a_hook_draws_depends_on_the_place(local):
    layer, hook = L.Linear(3, 3), Drawing()
    chunk, _ = make(layer)
    chunk.forward(0, (ones(2, 3),), PLACE)      # seen to draw nothing
    if local:
        layer.add_hook(hook)
        chunk, _ = make(layer)
    for iteration in (1, 2, 1):
        place = PLACE._replace(iteration=iteration)
        if local:
            chunk.forward(0, (ones(2, 3),), place)
        else:
            with hook:
                chunk.forward(0, (ones(2, 3),), place)
    assert hook.drawn[0] == hook.drawn[2] != hook.drawn[1]


def gradients_of(cut, defer, recompute):
    """Of layers in chunks that begin where ``cut`` says, as bytes."""
    np.random.seed(0)
    layers = [L.Linear(6, 5), F.relu, L.Linear(5, 4), F.relu, L.Linear(4, 3)]
    chunks = [make(*layers[start:end], first=start == 0, start=start,
                   recompute=recompute)
              for start, end in itertools.pairwise((0, *cut, len(layers)))]
    inputs = np.random.RandomState(1).randn(500, 6).astype('f')
    sizes = range(0, 500, 100)
    outputs = []
    for number, start in enumerate(sizes):
        arrays = (inputs[start:start + 100],)
        for chunk, _ in chunks:
            arrays = chunk.forward(number, arrays, PLACE)
        outputs.append(arrays)
    for number, arrays in enumerate(outputs):
        for chunk, _ in reversed(chunks):
            chunk.restore(number)
            arrays = chunk.backward(number, arrays, defer)
            if not defer and number == 3:
                chunk.settle()
    for number in range(len(outputs) if defer else 0):
        for chunk, _ in chunks:
            chunk.backward_weight(number)
            if number == 3:
                chunk.settle()
    for _, sums in chunks:
        sums.finish(None)
    return [parameter.grad.tobytes() for layer in layers[::2]
            for parameter in layer.params()]


@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('defer', [False, True])
@pytest.mark.parametrize('cut', [(), (1,), (2,), (1, 3), (2, 4)])
def test_small_micro_batches_give_the_same_bits(cut, defer, recompute):
    assert gradients_of(cut, defer, recompute) == gradients_of(
        (), False, False)


def test_outputs_have_the_same_bits_with_and_without_a_way_back():
    layers, x = [L.Linear(300, 70), F.relu], np.random.randn(60, 300)
    arrays = (x.astype('f'),)
    kept, found = make(*layers)[0], []
    for run in (kept.forward, kept.infer,
                make(*layers, recompute=True)[0].forward):
        (y,) = run(0, arrays, PLACE)
        found.append(y.tobytes())
    assert found[0] == found[1] == found[2]


def test_settling_leaves_other_chunks_alone():
    layers = L.Linear(3, 3), L.Linear(3, 3)
    mine, sums = make(layers[0])
    other = Chunk([LayerBlock((1, layers[1]), first=True)], recompute=False,
                  sums=sums, statistics=BatchStatistics(), parameters=[])
    kept = []
    for chunk in (mine, other):
        chunk.forward(0, (ones(2, 3),), PLACE)
        gradient = ones(2, 3)
        kept.append(weakref.ref(gradient))
        chunk.backward(0, (gradient,))
        del gradient
    mine.settle()
    assert kept[0]() is None
    assert kept[1]() is not None
