"""What is measured of a job, and what stays as it was."""
from chainer_fp8pipe.planner import exchange_times
from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.model_figures import measure_model
from chainer_fp8pipe.planning.step import ExchangeFigures

import chainer
import numpy
import pytest

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
    assert 'PlaceholderError' in figures.undivided
    assert {name for call in figures.calls for name in call.parameters} == (
        set(figures.parameters))


@on_ranks(2)
def test_without_room_for_a_copy_single_calls_are_timed(comm):
    figures, *_ = measure_model(
        comm, Net(), Example(batch()), chainer.optimizers.SGD(), 2, False)
    assert sum(call.forward for call in figures.calls) > 0


@pytest.mark.parametrize(('seconds', 'processor', 'expected'), [
    ((.002, .009), .004, ExchangeFigures(2, .001, 1e-5, 5e-6)),
    # The longer one is never much shorter, nor does it begin before 0.
    ((.003, .002), 0, ExchangeFigures(2, .0018, 2.5e-7, 0.0)),
    ((0, .008), .1, ExchangeFigures(2, 0.0, .008 / 700, .008 / 700))])
def test_two_sizes_make_a_line(seconds, processor, expected):
    found = exchange_times.line(2, (100, 800), seconds, processor)
    assert found == pytest.approx(expected, abs=1e-9)


@on_ranks(4)
def test_every_layout_is_measured_alike_on_all_ranks(comm):
    found = exchange_times.measure_layouts(comm, (1, 2, 4),
                                           ('float32', 'fp8'), 10_000, .1)
    exchanges, links = found
    assert set(exchanges) == {
        *((1, codec, algorithm) for codec in ('float32', 'fp8')
          for algorithm in ('direct', 'ring', 'torus2d')),
        (2, 'float32', 'direct'), (2, 'fp8', 'direct')}
    assert set(links) == {2, 4}
    assert {one.replicas for one in exchanges.values()} == {2, 4}
    assert all(one.element > 0 and one.fixed >= 0
               for one in exchanges.values())
    assert comm.allgather(found) == [found] * 4
