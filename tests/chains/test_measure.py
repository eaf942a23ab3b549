"""What is measured of an optimizer."""
from chainer_fp8pipe.chains.measure import optimizer_arrays

import chainer
import pytest


@pytest.mark.parametrize(('kind', 'kept', 'taken'), [
    ('SGD', 0, 1), ('MomentumSGD', 1, 1), ('Adam', 2, 3)])
def test_arrays_of_an_optimizer_are_counted(kind, kept, taken):
    optimizer = getattr(chainer.optimizers, kind)()
    found, temporary = optimizer_arrays(
        optimizer, 'f', chainer.get_device('@numpy'))
    assert found == kept
    assert temporary == pytest.approx(taken, abs=.2)
    assert optimizer.target is None
