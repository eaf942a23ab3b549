from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.model_figures import (
    measure_model,
    measure_optimizer,
)

import chainer
import numpy

from tests.planner.nets import Net, batch, content
from tests.ranks import on_ranks


@on_ranks(1, 2)
def test_a_measured_model_stays_as_it_was(comm):
    numpy.random.seed(7)
    model = Net()
    before, state = content(model), numpy.random.get_state()[1].copy()
    figures, slowdown, _ = measure_model(
        comm, model, Example(batch()), chainer.optimizers.Adam(), 2, True)
    numpy.testing.assert_array_equal(numpy.random.get_state()[1], state)
    for name, value in content(model).items():
        numpy.testing.assert_array_equal(value, before[name], name)
    assert not hasattr(model, 'partition')
    assert figures.elements == model.count_params()
    assert (figures.samples, figures.few) == (8, 2)
    assert len(figures.calls) == len(figures.calls_few) > 5
    assert sum(call.forward + call.backward for call in figures.calls) > 0
    assert figures.micro_batch >= 0
    assert len(slowdown) == comm.size
    assert all(one >= 1 for one in slowdown)


@on_ranks(2)
def test_a_model_that_reads_values_is_measured_as_a_whole(comm):
    figures, *_ = measure_model(
        comm, Net(reads=True), Example(batch()), chainer.optimizers.SGD(), 2,
        True)
    assert 'GhostError' in figures.undivided
    assert {name for call in figures.calls for name in call.parameters} == (
        set(figures.parameters))


@on_ranks(2)
def test_without_room_for_a_copy_single_calls_are_timed(comm):
    figures, *_ = measure_model(
        comm, Net(), Example(batch()), chainer.optimizers.SGD(), 2, False)
    assert sum(call.forward for call in figures.calls) > 0


def test_frozen_parameters_are_not_updated():
    model = chainer.Sequential(chainer.links.Linear(400, 400),
                               chainer.links.Linear(400, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    shapes = dict(model.namedparams())
    whole = measure_optimizer(optimizer, shapes, model.device)
    assert whole[1] == 2
    model[0].disable_update()
    assert measure_optimizer(optimizer, shapes, model.device)[0] < whole[0]
    model.disable_update()
    assert measure_optimizer(optimizer, shapes, model.device) == (0, 0, 0)
