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


@on_ranks(2)
def test_a_static_scale_lets_nothing_through(comm):
    """Nor does one that was changed; another model's may be dynamic."""
    communicator = create_communicator('fp8', comm, check_every=0)
    static = [made(communicator, scale=scale)
              for scale in ({'scale': 64}, {'scale': 64}, {'scale': 1}, None)]
    optimizer, model = static[0]
    optimizer.update(lambda: F.sum(model(numpy.ones((2, 3), 'f'))))
    optimizer.loss_scaling(scale=128)
    assert diverge(*made(communicator, scale={})) is False
    for one in static:
        assert diverge(*one) is None
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
