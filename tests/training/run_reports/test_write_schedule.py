"""Reports are written at ends of epochs, and seldom enough."""
from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.training.run_reports import write_schedule
from chainer_fp8pipe.training.run_reports.write_schedule import (
    WriteSchedule,
    regular_updates,
    training_length,
)

import pytest
from chainer.training import get_trigger, triggers
from hypothesis import given
from hypothesis import strategies as st


def ends(samples, batch, epochs):
    """Updates after which an iterator that repeats begins a new epoch."""
    updates = range(1, -(-samples * epochs // batch) + 1)
    return [n for n in updates
            if n * batch // samples > (n - 1) * batch // samples]


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 6))
def test_each_end_of_an_epoch_is_written_where_that_costs_nothing(
        samples, batch, epochs):
    schedule = WriteSchedule(0, 0.0, (epochs, 'epoch'))
    found, done = [], 1
    with mock.patch.object(write_schedule, 'SHORTEST', 0.0):
        while not found or found[-1] < ends(samples, batch, epochs)[-1]:
            done = schedule.next(done, done * batch / samples, 1.0)
            found.append(done)
    assert found == [n for n in ends(samples, batch, epochs) if n > 1] or (
        ends(samples, batch, epochs)[-1] == 1)


@given(st.floats(1e-4, 100), st.integers(2, 1000))
def test_writes_are_ten_seconds_apart_at_least(step, epoch):
    following = WriteSchedule(0, 0.0, None).next(epoch, 1.0, step)
    assert step * (following - epoch) >= 9.999


@pytest.mark.parametrize(('step', 'following'), [
    (2.0, 400), (1e-3, 10_100)])
def test_long_epochs_are_written_in_between(step, following):
    """Every 10 minutes, and every 10,000 updates."""
    schedule = WriteSchedule(0, 0.0, (90, 'epoch'))
    assert schedule.next(100, 1e-3, step) == following


@pytest.mark.parametrize('epoch', [10, 1e9])
def test_writes_become_rarer_as_they_become_many(epoch):
    schedule = WriteSchedule(0, 0.0, None)
    usual = min(epoch, 60)          # 10 minutes of 10 s
    done, found = 1, []
    for _ in range(600):
        found.append(schedule.next(done, done / epoch, 10.0) - done)
        done += found[-1]
    assert found[1:256] == [usual] * 255
    assert found[256:512] == [2 * usual] * 256
    assert found[512:] == [4 * usual] * 88


@pytest.mark.parametrize(('length', 'last'), [
    ((25, 'iteration'), 25), ((3, 'epoch'), 30), ((2.55, 'epoch'), 26),
    (None, 1 << 62)])
def test_the_last_update_is_known(length, last):
    schedule = WriteSchedule(0, 0.0, length)
    assert schedule.last(4, 0.4) == last
    if length is None:
        return
    done = 1
    for _ in range(9):
        if done < last:
            done = schedule.next(done, done / 10, 10.0)
    assert done == last


def test_a_run_that_goes_on_counts_from_where_it_begins():
    schedule = WriteSchedule(100, 10.0, (12, 'epoch'))
    assert schedule.next(101, 10.1, 10.0) == 110
    assert schedule.last(110, 11.0) == 120


def test_an_updater_without_epochs_is_written_by_time():
    schedule = WriteSchedule(0, 0.0, None)
    assert schedule.next(1, 0.0, 6.0) == 101


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(1, 8))
def test_regular_updates_are_spread_over_what_follows(done, updates, count):
    found = regular_updates(done, done + updates, count)
    assert found == sorted(set(found))
    assert done < found[0]
    assert found[-1] <= done + updates
    assert len(found) == min(count, updates) or updates < 2 * count
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps, default=1) <= 2 + updates / count


@pytest.mark.parametrize(('trigger', 'length'), [
    ((5, 'epoch'), (5, 'epoch')), ((7, 'iteration'), (7, 'iteration')),
    (triggers.EarlyStoppingTrigger(max_trigger=(9, 'epoch')), (9, 'epoch')),
    (triggers.TimeTrigger(5), None), (lambda trainer: False, None)])
def test_the_length_is_what_the_stop_trigger_says(trigger, length):
    trainer = SimpleNamespace(stop_trigger=get_trigger(trigger))
    assert training_length(trainer) == length
