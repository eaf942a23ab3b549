"""Seconds and bytes add up, and events are kept for who asks."""
import threading

from chainer_fp8pipe.report import stream
from chainer_fp8pipe.report.stream import (
    Event,
    EventStream,
    events_of,
)

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until told."""
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now
    clock = Clock()
    monkeypatch.setattr(stream, 'time', clock)
    return clock


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_sections_add_up_and_exclude_each_other(clock):
    events = EventStream()
    for _ in range(2):
        with events.section('exchange'):
            clock.now += 1
            with events.section('decode'):
                clock.now += 5
            clock.now += 2
        clock.now += 10         # outside any section
    assert events.seconds == {'encode': 0, 'exchange': 6, 'decode': 10}


def test_threads_have_sections_of_their_own(clock):
    """What was done beside the backward pass is counted by itself."""
    events = EventStream()

    def work():
        events.hide()
        with events.section('encode'):
            clock.now += 4
    with events.section('exchange'):
        clock.now += 1
        in_thread(work)
    assert events.hidden == {'encode': 4, 'exchange': 0, 'decode': 0}
    assert events.seconds == {'encode': 0, 'exchange': 5, 'decode': 0}


def test_a_part_of_a_section_can_be_given_to_others_afterwards(clock):
    events = EventStream()
    with events.section('exchange'):
        clock.now += 10
        with events.section('decode'), events.section('exchange'):
            events.divide(encode=0.25, decode=0.0)
        events.divide(encode=2.75, decode=4.0)
    assert events.seconds == {'encode': 3, 'exchange': 3, 'decode': 4}
    events.divide(encode=1.0)         # of no section
    assert events.seconds['encode'] == 4


# --- events ------------------------------------------------------------------

def test_sections_bytes_and_values_are_events_while_recording(clock):
    clock.now = 100.0
    events = EventStream()
    with events.section('update'):      # began before the recording
        kept = events.keep()
        clock.now += 1
    clock.now += 1
    with events.section('exchange'):
        clock.now += 1
        with events.section('encode'):
            events.sent(40)
            clock.now += 2
        events.sent(2)
    with events.section('forward', micro_batch=4, chunk=1):
        clock.now += 1
    with events.section('send', 1, 0):
        events.carried(10, 40)
    events.keep_no_more(kept)
    with events.section('update'):
        clock.now += 1
    assert events_of(kept, 3, 100.0) == [
        Event(3, 'update', 0, 1), Event(3, 'encode', 3, 5, bytes=40),
        Event(3, 'exchange', 2, 5, bytes=2), Event(3, 'forward', 5, 6, 4, 1),
        Event(3, 'send', 6, 6, 1, 0, bytes=10)]
    assert (events.bytes_sent, events.stage_bytes, events.stage_arrays) == (
        42, 10, 40)


def test_a_thread_that_polls_makes_one_event(clock):
    events, kept = EventStream(), []

    def work():
        events.hide()
        with events.section('exchange'):
            kept.append(events.keep())      # in the middle of a poll
            clock.now += 1
        for wait in (50e-6, 50e-6, 1.0, 50e-6):
            with events.section('exchange'):
                events.sent(1)
                clock.now += 1
            clock.now += wait
    in_thread(work)
    assert [(event.beside, event.bytes, round(event.start), round(event.end))
            for event in events_of(*kept, 0, 0.0)] == [
                (True, 3, 0, 4), (True, 1, 5, 6)]
    assert events.hidden['exchange'] == pytest.approx(5)


def test_several_keep_the_same_events(clock):
    """Each from its own time on, and on its own clock."""
    events = EventStream()
    first = events.keep()
    with events.section('exchange'):
        clock.now += 1
        # A section in one of its name is no event of its own.
        with events.section('decode'), events.section('exchange'):
            events.sent(5)
            clock.now += 1
    second = events.keep()
    events.keep_no_more(first)
    events.keep_no_more(first)
    with events.section('forward'):
        clock.now += 1
    assert events_of(first, 0, 0.0) == [
        Event(0, 'decode', 1, 2), Event(0, 'exchange', 0, 2, bytes=5)]
    assert events.seconds['exchange'] == 2
    assert events_of(second, 7, 1.0) == [Event(7, 'forward', 1, 2)]
