"""What ranks waited for, where that is known from how events were made."""
import random

from chainer_fp8pipe.report.diagnosis import explain_waits
from chainer_fp8pipe.report.events import EXCHANGE, Event

import pytest

from .made_up_run import MadeUpRun


def waits(events, **options):
    return [event for event in explain_waits(events, **options)
            if event.name == 'wait']


def test_an_exchange_waits_for_the_last_rank_and_says_what_that_did():
    events = [Event(0, 'forward', 0, 1), Event(0, 'exchange', 1, 6, bytes=9),
              Event(1, 'forward', 0, 1), Event(1, 'backward', 1, 4),
              Event(1, 'exchange', 4, 6, bytes=9)]
    parts = explain_waits(events)
    assert [event for event in parts if event.rank == 0][1:] == [
        Event(0, 'wait', 1, 4, about='rank 1: backward',
              values=(('rank', 1.0),)),
        Event(0, 'exchange', 4, 6, bytes=9)]
    assert [event for event in parts if event.rank == 1] == [
        event for event in events if event.rank == 1]


def test_a_receive_waits_for_its_sender():
    events = [Event(0, 'forward', 0, 4, 2, 0), Event(0, 'send', 4, 5, 2, 0),
              Event(1, 'receive', 1, 6, 2, 1), Event(1, 'forward', 6, 7, 2, 1)]
    assert waits(events) == [Event(
        1, 'wait', 1, 4, 2, 1, about='rank 0: forward of micro-batch 2',
        values=(('rank', 0.0),))]


def test_stages_exchange_among_themselves():
    """Ranks 0 and 2, and 1 and 3; rank 3 is the last of all."""
    events = [Event(rank, 'exchange', rank, 10) for rank in range(4)]
    assert [(wait.rank, wait.end, wait.values) for wait in waits(
        events, stages=(0, 1, 0, 1))] == [
            (0, 2, (('rank', 2.0),)), (1, 3, (('rank', 3.0),))]


def test_a_rank_that_did_nothing_that_is_known_is_still_named():
    events = [Event(0, 'exchange', 0, 5), Event(1, 'exchange', 4, 5)]
    assert [wait.about for wait in waits(events)] == [
        'rank 1: nothing that was recorded']


@pytest.mark.parametrize('other', [
    [Event(1, 'exchange', 2, 3), Event(1, 'exchange', 4, 5)],   # more of them
    [Event(1, 'exchange', 9, 10)],      # after the first has ended
    [Event(1, 'exchange', 2, 5, lane=EXCHANGE)]])       # beside
def test_exchanges_that_do_not_wait_for_each_other_stay_whole(other):
    events = [Event(0, 'exchange', 0, 5), *other]
    assert explain_waits(events) == events


def test_the_last_rank_is_named_in_every_made_up_update():
    for seed in range(50):
        draw = random.Random(seed)
        slow = draw.randrange(4)
        record = MadeUpRun(slow={slow: 2.0}, epochs=1, updates=12, kept=12,
                           seed=seed).record()
        for update in record.updates:
            found = waits(update.events)
            assert {wait.rank for wait in found} == {*range(4)} - {slow}
            for wait in found:
                assert wait.values == (('rank', float(slow)),)
                assert wait.about.startswith(f'rank {slow}: ')


def test_all_time_is_accounted_for():
    for update in MadeUpRun(epochs=1, kept=8).record().updates:
        for rank in range(4):
            whole = sum(event.end - event.start for event in update.events
                        if event.rank == rank)
            parts = sum(event.end - event.start
                        for event in explain_waits(update.events)
                        if event.rank == rank)
            assert parts == pytest.approx(whole)
