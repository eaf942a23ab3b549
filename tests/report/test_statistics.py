import threading

from chainer_fp8pipe.report import statistics
from chainer_fp8pipe.report.statistics import Statistics

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until told."""
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now
    clock = Clock()
    monkeypatch.setattr(statistics, 'time', clock)
    return clock


def test_sections_add_up(clock):
    counters = Statistics()
    for _ in range(2):
        with counters.section('encode'):
            clock.now += 3
        clock.now += 10         # outside any section
    assert counters.seconds == {'encode': 6, 'exchange': 0, 'decode': 0}


def test_an_inner_section_does_not_count_for_the_outer(clock):
    counters = Statistics()
    with counters.section('exchange'):
        clock.now += 1
        with counters.section('decode'):
            clock.now += 5
        clock.now += 2
    assert counters.seconds == {'encode': 0, 'exchange': 3, 'decode': 5}


def test_what_is_excluded_counts_for_no_section(clock):
    counters = Statistics()
    with counters.section('exchange'):
        clock.now += 1
        with counters.excluded():
            clock.now += 5
            with counters.section('decode'):
                clock.now += 7
        clock.now += 2
    with counters.excluded():
        clock.now += 1
    assert counters.seconds == {'encode': 0, 'exchange': 3, 'decode': 7}


def test_an_error_inside_closes_the_section(clock):
    counters = Statistics()
    def fail():
        with counters.section('encode'):
            clock.now += 1
            raise KeyError
    with pytest.raises(KeyError):
        fail()
    with counters.section('decode'):
        clock.now += 2
    assert counters.seconds == {'encode': 1, 'exchange': 0, 'decode': 2}


def test_threads_have_sections_of_their_own(clock):
    """What was done beside the backward pass is counted by itself."""
    counters = Statistics()

    def work():
        counters.hide()
        with counters.section('encode'):
            clock.now += 4
    with counters.section('exchange'):
        clock.now += 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert counters.hidden == {'encode': 4, 'exchange': 0, 'decode': 0}
    assert counters.seconds == {'encode': 0, 'exchange': 5, 'decode': 0}
    assert counters.waited == 5


def test_a_part_of_a_section_can_be_given_to_others_afterwards(clock):
    counters = Statistics()
    with counters.section('exchange'):
        clock.now += 10
        counters.divide(encode=3.0, decode=4.0)
    assert counters.seconds == {'encode': 3, 'exchange': 3, 'decode': 4}
    counters.divide(encode=1.0)         # of no section
    assert counters.seconds['encode'] == 4
