"""When gradients become final, and when that is looked at."""
import itertools
import math
import time

from chainer_fp8pipe.exchange.buckets import ReadyTimes

import pytest


@pytest.fixture
def finals(monkeypatch):
    moments = itertools.count()
    monkeypatch.setattr(time, 'perf_counter', lambda: float(next(moments)))
    return ReadyTimes()


def a_pass(finals, names):
    """One second from each gradient to the next; '-' is for nobody."""
    finals.begin()
    for name in names:
        finals.note(name)


def test_times_count_from_the_first_gradient_of_the_last_pass(finals):
    a_pass(finals, 'cb')
    a_pass(finals, 'b-c')
    assert finals.keep(False)
    assert finals.usual('abc') == [math.inf, 0, 2]


def test_looks_become_rarer(finals):
    assert finals.keep(False)
    looks = [number for number in range(1, 100) if finals.keep(True)]
    assert looks == [5, 10, 20, 40, 80]
    assert finals.keep(False)           # another codec, for example
    assert [number for number in range(1, 12) if finals.keep(True)] == [5, 10]


def test_with_early_buckets_the_time_without_does_not_count(finals):
    a_pass(finals, 'ab')
    finals.keep(False)
    for _ in range(3):
        a_pass(finals, 'a--b')
        finals.keep(True)
    assert finals.usual('ab') == [0, 3]


def test_a_single_update_that_was_disturbed_does_not_count(finals):
    for gap in 2, 2, 90, 2, 3:
        a_pass(finals, 'a' + '-' * gap + 'b')
        finals.keep(True)
    assert finals.usual('ab') == [0, 3]


def test_the_last_updates_count(finals):
    for gap in [9] * 100 + [4] * 20:
        a_pass(finals, 'a' + '-' * gap + 'b')
        finals.keep(True)
    assert finals.usual('ab') == [0, 5]


def test_what_is_mostly_not_final_never_is(finals):
    for names in 'ab', 'a', 'a':
        a_pass(finals, names)
        finals.keep(True)
    assert finals.usual('ab') == [0, math.inf]
