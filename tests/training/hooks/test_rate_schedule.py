from chainer_fp8pipe.training.hooks import RateSchedule
from chainer_fp8pipe.training.learning_rate import LearningRate

import chainer
import numpy
import pytest

from .helpers import model_of

RATE = LearningRate(0.5, 32, 8, 1, 4)


def set_up(hook):
    optimizer = chainer.optimizers.SGD(7.0).setup(
        model_of(W=numpy.zeros((2, 2), 'f4')))
    optimizer.add_hook(hook)
    return optimizer


def update(optimizer):
    """One of gradients of one; returns the rate that was used."""
    weight = optimizer.target.W
    before = weight.array.copy()
    weight.grad = numpy.ones_like(before)
    optimizer.update()
    return float((before - weight.array)[0, 0])


def test_every_update_has_the_rate_of_its_number():
    optimizer = set_up(RateSchedule(RATE, samples=128))
    used = [update(optimizer) for _ in range(18)]
    assert used == pytest.approx(
        [RATE.at(number / 4) for number in range(18)], abs=1e-5)
    assert used[:5] == pytest.approx([0.5, 0.875, 1.25, 1.625, 2.0])
    assert optimizer.lr == 0        # after the last epoch


def test_a_resumed_optimizer_goes_on_where_it_was(tmp_path):
    first = set_up(RateSchedule(RATE, samples=128))
    used = [update(first) for _ in range(6)]
    chainer.serializers.save_npz(tmp_path / 'state.npz', first)
    second = set_up(RateSchedule(RATE, samples=128))
    chainer.serializers.load_npz(tmp_path / 'state.npz', second)
    assert used + [update(second)] == pytest.approx(
        [RATE.at(number / 4) for number in range(7)], abs=1e-5)


def test_the_schedule_takes_the_epoch_it_is_told_without_samples():
    hook = RateSchedule(RATE)
    optimizer = set_up(hook)
    hook.epoch = 2.5
    assert update(optimizer) == pytest.approx(RATE.at(2.5))


def test_not_to_know_how_far_the_training_is_is_an_error():
    with pytest.raises(RuntimeError, match=r'samples=.*FollowEpochs'):
        update(set_up(RateSchedule(RATE)))


@pytest.mark.parametrize(('samples', 'message'), [
    (0, 'samples must be a positive integer, not 0'),
    (1.5, 'samples must be a positive integer, not 1.5'),
    (31, 'batch=32 is more than the samples=31')])
def test_bad_sizes_are_errors(samples, message):
    with pytest.raises(ValueError, match=message):
        RateSchedule(RATE, samples)
