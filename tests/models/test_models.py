"""The collection of models learns, and is what it says it is."""
import chainer_fp8pipe  # noqa: F401, before chainer

import chainer
import numpy
import pytest

from tests.models import MODELS

QUICK = [case for case in MODELS.values() if not case.slow]
_STEPS = 10


def each(cases):
    return pytest.mark.parametrize('case', cases, ids=lambda case: case.name)


def _made(case):
    numpy.random.seed(0)
    batch = case.batch(numpy.random.RandomState(1), case.samples)
    return case.make(), batch


def _loss(case, model, batch, seed):
    numpy.random.seed(seed)
    return case.loss(model, batch)


def _without_gradient(model):
    return {name for name, param in model.namedparams()
            if param.grad is None}


@each(QUICK)
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


@each(QUICK)
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
