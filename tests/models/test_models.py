"""The collection of models learns, and is what it says it is."""

import chainer
import numpy
import pytest

from tests.models import MODELS
from tests.training.updaters.partitions import part

#: Models that are tried always; the others show the same in other fields.
QUICK = frozenset((
    'skip_mlp', 'chain_list', 'maxout', 'sparse_experts', 'graph_attention',
    'thinking_time', 'dropout_and_norms', 'regularised', 'wide_and_deep',
    'hyper_network', 'ode', 'deep_q', 'distilled', 'frozen',
    'shared_parameters', 'moving_average', 'layer_drop', 'unet', 'senet',
    'spatial_transformer', 'statistics_per_pixel', 'segmentation', 'siamese',
    'multi_task', 'seq2seq', 'ctc', 'n_step_lstm', 'stateful_lm', 'encoder',
    'vae'))
SMALL = [case for case in MODELS.values() if not case.slow]
_STEPS = 10


def each(cases):
    return pytest.mark.parametrize('case', [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK
                     else pytest.mark.slow) for case in cases])


def _made(case, samples=None):
    numpy.random.seed(0)
    batch = case.batch(numpy.random.RandomState(1), samples or case.samples)
    return case.make(), batch


def _loss(case, model, batch, seed):
    numpy.random.seed(seed)
    return case.loss(model, batch)


def _arrays(batch):
    return list(batch.values() if isinstance(batch, dict) else batch)


def _without_gradient(model):
    return {name for name, param in model.namedparams()
            if param.grad is None}


@each(SMALL)
def test_it_learns_one_batch_by_all_its_parameters(case):
    model, batch = _made(case)
    optimizer = chainer.optimizers.Adam(5e-3).setup(model)
    losses, missing = [], None
    for step in range(_STEPS):
        loss = _loss(case, model, batch, step)
        assert loss.shape == ()
        losses.append(float(loss.array))
        model.cleargrads()
        loss.backward()
        # A coin or a gate may leave out a layer, but not in every step.
        gone = _without_gradient(model)
        missing = gone if missing is None else missing & gone
        optimizer.update()
    assert numpy.isfinite(losses).all()
    assert numpy.mean(losses[-3:]) < numpy.mean(losses[:3])
    assert missing == set(case.unused)


@each(SMALL)
def test_a_batch_can_be_cut_along_its_first_axis(case):
    model, batch = _made(case)
    assert {len(array) for array in _arrays(batch)} == {case.samples}
    size, rest = divmod(case.samples, 4)
    assert not rest
    for start in range(0, case.samples, size):
        loss = case.loss(model, part(batch, start, start + size))
        assert numpy.isfinite(loss.array)


@each(SMALL)
def test_it_is_what_it_says_it_is(case):
    """Random, stateful, or normalising."""
    model, batch = _made(case)
    other = case.batch(numpy.random.RandomState(2), case.samples)
    _loss(case, model, batch, 0)
    before, _, after = (float(_loss(case, model, data, 0).array)
                        for data in (batch, other, batch))
    assert (before != after) == case.stateful
    if not case.stateful:
        losses = {float(_loss(case, model, batch, seed).array)
                  for seed in range(4)}
        assert (len(losses) > 1) == case.draws
    unused = {name.rpartition('/')[0] for name in case.unused}
    assert case.batch_norm == any(
        isinstance(link, chainer.links.BatchNormalization)
        for name, link in model.namedlinks() if name not in unused)


# The rest of the zoo takes seconds, and is built in the same ways.
@each([MODELS['resnet50_features'], MODELS['googlenet']])
def test_one_of_the_zoo_has_all_gradients(case):
    model, batch = _made(case, 1 if case.name == 'googlenet' else 2)
    loss = case.loss(model, batch)
    model.cleargrads()      # they are NaN until then, not None
    loss.backward()
    assert numpy.isfinite(loss.array)
    assert _without_gradient(model) == set(case.unused)


def test_a_batch_is_that_of_its_seed():
    for case in MODELS.values():
        one, two = (_arrays(case.batch(numpy.random.RandomState(5), 2))
                    for _ in range(2))
        for a, b in zip(one, two, strict=True):
            assert a.dtype in ('f', 'i')
            numpy.testing.assert_array_equal(a, b)
