"""An optimizer is timed and weighed without being touched."""
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.planner.optimizer_figures import measure_optimizer

import chainer
import numpy
import pytest

from tests.planner.nets import Net, content


@pytest.mark.parametrize(('optimizer', 'arrays'), [
    (chainer.optimizers.SGD(), 0), (chainer.optimizers.MomentumSGD(), 1),
    (chainer.optimizers.Adam(), 2)])
def test_an_optimizer_is_timed_on_parameters_of_its_own(optimizer, arrays):
    model = Net()
    optimizer.setup(model)
    before = content(model)
    seconds, kept, temporary = measure_optimizer(
        optimizer, parameters_of(Names(model)), model.device)
    assert kept == arrays
    assert seconds.value > 0
    assert temporary >= 0
    assert optimizer.target is model
    assert optimizer.t == 0
    for name, value in content(model).items():
        numpy.testing.assert_array_equal(value, before[name], name)
