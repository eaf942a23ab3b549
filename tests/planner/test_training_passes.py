"""Times of training, reckoned from made-up ones; what is trained stays."""
from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.training_passes import (
    in_situ,
    measured_in_training,
    overheads,
    plain_pass,
)

import numpy
import pytest

from tests.planner.nets import Net, batch, content


def test_passes_of_each_size_have_their_median_and_their_spread():
    large, small = in_situ([
        numpy.array([[3.0, 4.0], [1.0, 2.0], [2.0, 9.0]]),
        numpy.array([[1.0, 1.0]] * 3)])
    assert large[:2] == (2.0, 4.0)
    # Quartiles of 3, 7 and 11.
    assert large.spread == pytest.approx(2 / 7)
    assert small == (1.0, 1.0, 0.0)


def test_what_each_micro_batch_adds_is_not_the_steps():
    step, micro_batch = overheads(numpy.full(5, 7.0), numpy.full(5, 13.0))
    assert micro_batch.value == pytest.approx(2.0)
    assert step.value == pytest.approx(5.0)


def test_noise_makes_no_overhead_negative():
    step, micro_batch = overheads(numpy.array([1.0]), numpy.array([0.5]))
    assert (step.value, micro_batch.value) == (1.0, 0.0)
    step, micro_batch = overheads(numpy.array([1.0]), numpy.array([7.0]))
    assert (step.value, micro_batch.value) == (0.0, 2.0)


def test_a_plain_pass_leaves_random_numbers_to_training():
    model = Net()
    numpy.random.seed(7)
    state = numpy.random.get_state()[1].copy()
    assert min(plain_pass(model, batch())()) > 0
    numpy.testing.assert_array_equal(numpy.random.get_state()[1], state)


@pytest.mark.parametrize('divisible', [True, False])
def test_a_model_that_is_trained_for_its_times_stays_as_it_was(divisible):
    model = Net()
    before = content(model)
    found = measured_in_training(model, Example(batch()), (8, 2), divisible)
    assert len(found.plain) == 2
    assert min(one.forward for one in found.plain) > 0
    assert len(found.laps) == (2 if divisible else 0)
    for laps in found.laps:
        assert len(laps) > 4
        assert min(sum(laps.values(), ())) >= 0
    for name, value in content(model).items():
        numpy.testing.assert_array_equal(value, before[name], name)
