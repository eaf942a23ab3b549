"""NaN is an error unless the optimizers scale the loss dynamically."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.exchange.exchange import NonfiniteMean

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest

from tests.ranks import on_ranks


def made(communicator, *, scale=None, wraps=True, target=None, model=None):
    """An optimizer that has been set up, and its model."""
    model = model or L.Linear(3, 2)
    optimizer = chainer.optimizers.SGD(.1)
    optimizer.setup(target or model)
    if scale is not None:
        optimizer.loss_scaling(**scale)
    return (chainermn.create_multi_node_optimizer(optimizer, communicator)
            if wraps else optimizer), model


def diverge(optimizer, model, communicator=None, updates=8):
    """NaN in the last update, or None where it was an error."""
    try:
        for step in range(updates):
            x = numpy.full((2, 3), numpy.nan if step == updates - 1 else 1,
                           'f')
            if communicator is None:
                optimizer.update(lambda x=x: F.sum(model(x)))
                continue
            model.cleargrads()
            F.sum(model(x)).backward(loss_scale=optimizer._loss_scale)
            communicator.multi_node_mean_grad(model)
            optimizer.update()
    except NonfiniteMean:
        return None
    return bool(numpy.isnan(model.W.array).any())


@pytest.mark.parametrize('scale', [{'scale': 64}, {'scale': 1}, None])
@on_ranks(2)
def test_a_static_scale_lets_nothing_through(comm, scale):
    communicator = create_communicator('fp8', comm, check_every=0)
    assert diverge(*made(communicator, scale=scale)) is None
    communicator.finalize()


@on_ranks(2)
def test_nor_does_one_that_was_changed(comm):
    communicator = create_communicator('fp8', comm, check_every=0)
    optimizer, model = made(communicator, scale={'scale': 64})
    optimizer.update(lambda: F.sum(model(numpy.ones((2, 3), 'f'))))
    optimizer.loss_scaling(scale=128)
    assert diverge(optimizer, model) is None
    communicator.finalize()


@pytest.mark.parametrize('overlap', [False, True])
@on_ranks(2)
def test_dynamic_scaling_skips_the_update(comm, overlap):
    communicator = create_communicator('fp8', comm, overlap=overlap)
    assert diverge(*made(communicator, scale={})) is False
    # In a loop of one's own, too, and of a part of what is optimized.
    optimizer, model = made(communicator, scale={}, wraps=False)
    assert diverge(optimizer, model, communicator) is False
    part = L.Linear(3, 2)
    optimizer, _ = made(communicator, scale={}, wraps=False, model=part,
                        target=chainer.Sequential(part, F.relu))
    assert diverge(optimizer, part, communicator) is False
    communicator.finalize()


@on_ranks(2)
def test_each_of_two_models_has_its_own_optimizer(comm):
    communicator = create_communicator('fp8', comm, check_every=0)
    dynamic = made(communicator, scale={})
    static = made(communicator, scale={'scale': 1})
    assert diverge(*dynamic) is False
    assert diverge(*static) is None
    communicator.finalize()
