import math

from chainer_fp8pipe.training.learning_rate import (
    LearningRate,
    Polynomial,
    Steps,
)

import pytest
from hypothesis import example, given
from hypothesis import strategies as st


def goyal(**changes):
    """ImageNet in an hour: 8192 samples, 0.1 for 256, 90 epochs."""
    return LearningRate(**{'base_lr': 0.1, 'batch': 8192, 'base_batch': 256,
                           'warmup_epochs': 5, 'epochs': 90,
                           'decay': 'step', **changes})


def test_the_highest_rate_is_that_of_the_paper():
    assert goyal().peak == pytest.approx(3.2)


@pytest.mark.parametrize(('epoch', 'rate'), [
    (0, 0.1), (2.5, 1.65), (5, 3.2), (29.99, 3.2), (30, 0.32), (59.99, 0.32),
    (60, 0.032), (80, 0.0032), (90, 0.0032), (1000, 0.0032)])
def test_warm_up_and_steps_are_those_of_the_paper(epoch, rate):
    assert goyal().at(epoch) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(('epoch', 'share'), [
    (5, 1), (47.5, 0.25), (81.5, 0.01), (90, 0), (95, 0)])
def test_the_polynomial_is_a_square_of_what_is_left(epoch, share):
    rate = goyal(decay='polynomial')
    assert rate.at(epoch) == pytest.approx(3.2 * share, abs=1e-12)


def test_decays_may_be_given_as_functions():
    assert goyal(decay=Polynomial(1)).at(47.5) == pytest.approx(1.6)
    rate = goyal(decay=Steps((10, 20), 0.5))
    assert [rate.at(epoch) for epoch in (9, 10, 20)] == [3.2, 1.6, 0.8]
    cosine = goyal(decay=lambda epoch, warmup, epochs:
                   (1 + math.cos(math.pi * epoch / epochs)) / 2)
    assert cosine.at(45) == pytest.approx(1.6)
    assert goyal(decay='constant').at(89) == goyal().peak


@given(st.integers(1, 100), st.integers(1, 100), st.floats(1e-4, 10),
       st.floats(0.5, 10), st.floats(0.1, 50),
       st.sampled_from(['polynomial', 'step', 'constant']))
@example(49, 1, 1e-4, 1.0, 1.0, 'constant')     # 1e-4 * 49 / 49 < 1e-4
def test_the_rate_rises_to_the_scaled_rate_and_then_never_again(
        base_batch, factor, base_lr, warmup, rest, decay):
    rate = LearningRate(base_lr, base_batch * factor, base_batch, warmup,
                        warmup + rest, decay)
    rising = [rate.at(warmup * step / 10) for step in range(10)]
    falling = [rate.at(warmup + rest * step / 10) for step in range(12)]
    assert rising[0] == base_lr
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert max(rising + falling) <= rate.peak * (1 + 1e-12)
    assert rate.peak == pytest.approx(base_lr * factor)
    assert decay == 'step' or falling[0] == rate.peak


@pytest.mark.parametrize(('wrong', 'message'), [
    ({'batch': 128}, 'batch=128 is less than base_batch=256'),
    ({'batch': 0}, 'batch must be a positive integer, not 0'),
    ({'batch': 512.5}, 'batch must be a positive integer, not 512.5'),
    ({'base_batch': -1}, 'base_batch must be a positive integer'),
    ({'base_lr': -0.1}, 'base_lr must be a finite number above 0, not -0.1'),
    ({'base_lr': math.nan}, 'base_lr must be a finite number .* not nan'),
    ({'base_lr': math.inf}, 'base_lr must be a finite number'),
    ({'base_lr': '0.1'}, "base_lr must be a finite number .* not '0.1'"),
    ({'warmup_epochs': -1}, 'warmup_epochs must be a finite number not below'),
    ({'warmup_epochs': 90}, 'warmup_epochs=90 must be less than epochs=90'),
    ({'warmup_epochs': 91}, 'warmup_epochs=91 must be less than epochs=90'),
    ({'epochs': 0}, 'epochs must be a finite number above 0'),
    ({'epochs': math.nan}, 'epochs must be a finite number'),
    ({'decay': 'linear'}, 'decay must be one of polynomial, step, constant'),
])
def test_bad_numbers_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        goyal(**wrong)


def test_bad_decays_are_errors():
    with pytest.raises(ValueError, match='power must be'):
        Polynomial(0)
    with pytest.raises(ValueError, match='factor must be'):
        Steps((1,), -1)
    with pytest.raises(ValueError, match='a milestone must be'):
        Steps((math.nan,))
