"""Reports are written at ends of epochs, and seldom enough."""
from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.training.run_reports import run_report
from chainer_fp8pipe.training.run_reports.run_report import (
    WriteSchedule,
    regular_updates,
)

import pytest
from chainer.training import get_trigger, triggers
from hypothesis import given
from hypothesis import strategies as st


class Run:
    """A training that goes on when it is told; its schedule."""

    def __init__(self, epoch, step=10.0, done=0, length=None):
        self.epoch, self.step, self.begun = epoch, step, done
        self.updater = SimpleNamespace(iteration=done,
                                       epoch_detail=done / epoch)
        trigger = get_trigger(length) if length else lambda trainer: False
        self.schedule = WriteSchedule(SimpleNamespace(
            updater=self.updater, stop_trigger=trigger))

    def at(self, done):
        """When to write next, and the last update, at an update."""
        self.updater.iteration = done
        self.updater.epoch_detail = done / self.epoch
        return self.schedule.next(self.step * (done - self.begun))


def ends(samples, batch, epochs):
    """Updates after which an iterator that repeats begins a new epoch."""
    updates = range(1, -(-samples * epochs // batch) + 1)
    return [n for n in updates
            if n * batch // samples > (n - 1) * batch // samples]


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 6))
def test_each_end_of_an_epoch_is_written(samples, batch, epochs):
    expected = ends(samples, batch, epochs)
    run = Run(samples / batch, 1.0, length=(epochs, 'epoch'))
    with mock.patch.object(run_report, 'SHORTEST', 0.0):
        found = [run.at(1)[0]]
        while found[-1] < expected[-1]:
            found.append(run.at(found[-1])[0])
    assert found == [n for n in expected if n > 1] or expected[-1] == 1


@given(st.floats(1e-4, 100), st.integers(2, 1000))
def test_writes_are_ten_seconds_apart_at_least(step, epoch):
    following, _ = Run(epoch, step).at(epoch)
    assert step * (following - epoch) >= 9.999


@pytest.mark.parametrize(('epoch', 'step', 'following'), [
    (1e5, 2.0, 400), (1e5, 1e-3, 10_100), (float('inf'), 6.0, 200)])
def test_long_epochs_are_written_in_between(epoch, step, following):
    """Every 10 minutes, and every 10,000 updates, or without epochs."""
    assert Run(epoch, step).at(100) == (following, 1 << 62)


@pytest.mark.parametrize('epoch', [10, 1e9])
def test_writes_become_rarer_as_they_become_many(epoch):
    run, usual = Run(epoch), min(epoch, 60)     # 10 minutes of 10 s
    done, found = 1, []
    for _ in range(600):
        found.append(run.at(done)[0] - done)
        done += found[-1]
    assert found[1:256] == [usual] * 255
    assert found[256:512] == [2 * usual] * 256
    assert found[512:] == [4 * usual] * 88


@pytest.mark.parametrize(('length', 'last'), [
    ((25, 'iteration'), 25), ((3, 'epoch'), 30), ((2.55, 'epoch'), 26),
    (triggers.EarlyStoppingTrigger(max_trigger=(3, 'epoch')), 30),
    (triggers.TimeTrigger(5), 1 << 62), (None, 1 << 62)])
def test_the_last_update_is_known_and_written(length, last):
    run = Run(10, length=length)
    assert run.at(4)[1] == last
    done = 1
    for _ in range(9):
        if done < last:
            done, _ = run.at(done)
    assert done == last or last == 1 << 62


def test_a_run_that_goes_on_counts_from_where_it_begins():
    run = Run(10, done=100, length=(12, 'epoch'))
    assert run.at(101) == (110, 120)


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(1, 8))
def test_regular_updates_are_spread_over_what_follows(done, updates, count):
    found = regular_updates(done, done + updates, count)
    assert found == sorted(set(found))
    assert done < found[0]
    assert found[-1] <= done + updates
    assert len(found) == min(count, updates) or updates < 2 * count
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps, default=1) <= 2 + updates / count
