"""Events become shares, waits with their causes, and a Chrome trace."""
import json
import random

from chainer_fp8pipe.pipeline.schedules import SCHEDULES, make_schedule
from chainer_fp8pipe.planning.schedule_time import Costs, Link, simulate
from chainer_fp8pipe.report.events import (
    BUCKETS,
    EXCHANGE,
    Event,
    chrome_trace,
    explain_waits,
    idle_share,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..pipeline.measured import as_measured
from .made_up_run import MadeUpRun

IDLE = [Event(0, 'forward', 5, 8, 0, 0), Event(0, 'update', 14, 15),
        Event(0, 'receive', 8, 14, 0, 0), Event(1, 'backward', 6, 8, 0, 1),
        Event(1, 'wait', 8, 9), Event(1, 'backward_weight', 9, 10, 0, 1),
        Event(1, 'recompute', 10, 11, 0, 1), Event(1, 'exchange', 11, 12),
        # Beside the main thread, and after all that is there.
        Event(1, 'encode', 11, 20, lane=EXCHANGE),
        Event(0, 'bucket', 11, 30, lane=BUCKETS)]


@pytest.mark.parametrize(('events', 'share'), [
    ([], 0), ([Event(0, 'forward', 1, 1)], 0), ([Event(0, 'forward', 1, 3)],
                                                0),
    # Two ranks for 10 s: 3 s + 1 s and 2 s + 1 s + 1 s of computation.
    (IDLE, 1 - 8 / 20)])
def test_all_but_computation_is_idle_time(events, share):
    assert idle_share(events) == pytest.approx(share)


# --- waits -------------------------------------------------------------------

def message(source, target, number, start, sent, taken, micro_batch=2):
    """From chunk 0 on one rank to chunk 1 on another; waits from start+1."""
    return [Event(source, 'forward', start, start + sent, micro_batch, 0),
            Event(source, 'send', start + sent, start + sent + 0.5,
                  micro_batch, 0),
            Event(target, 'receive', start + 1, start + taken, micro_batch,
                  1),
            Event(target, 'forward', start + taken, start + taken + 1,
                  micro_batch, 1)][:number]


def exchanges(*starts, end=10, lane=''):
    return [Event(rank, 'exchange', start, end, lane=lane, bytes=9)
            for rank, start in enumerate(starts)]


#: Events, and of each wait: its rank, start, end and cause.
CASES = {
    'a receive, until its message is sent': (
        message(0, 1, 4, 0, 4, 6),
        [(1, 1, 4, 'rank 0: forward of micro-batch 2')]),
    'a gradient, in the other direction': (
        [Event(1, 'backward', 7, 9, 0, 1), Event(1, 'send', 9, 10, 0, 1),
         Event(0, 'receive', 5, 11, 0, 0), Event(0, 'backward', 11, 13, 0,
                                                 0)],
        [(0, 5, 9, 'rank 1: backward of micro-batch 0')]),
    'a message that was there long ago': (message(0, 1, 4, 0, 0.5, 6), []),
    'clocks that do not agree quite': (
        message(0, 1, 4, 0, 8, 6), [
            (1, 1, 6, 'rank 0: forward of micro-batch 2')]),
    'a receive without its send': (message(0, 1, 4, 0, 4, 6)[2:], []),
    'a receive that took no time': (message(0, 1, 4, 0, 0.5, 1), []),
    'replicas: 0 and 1 of the first stage, 2 and 3 of the last': (
        message(0, 2, 4, 0, 4, 6) + message(1, 3, 4, 0, 5, 6), [
            (2, 1, 4, 'rank 0: forward of micro-batch 2'),
            (3, 1, 5, 'rank 1: forward of micro-batch 2')]),
    'one message after another': (
        message(0, 1, 4, 0, 4, 6) + message(0, 1, 4, 100, 4, 6), [
            (1, 1, 4, 'rank 0: forward of micro-batch 2'),
            (1, 101, 104, 'rank 0: forward of micro-batch 2')]),
    'an exchange, for the last rank': (
        [Event(1, 'backward', 1, 4), *exchanges(1, 4)],
        [(0, 1, 4, 'rank 1: backward')]),
    'for a rank that did nothing that is known': (
        exchanges(0, 4), [(0, 0, 4, 'rank 1: nothing that was recorded')]),
    'a rank encodes while it waits, across the end of the wait': (
        [Event(0, 'encode', 1, 2), Event(0, 'encode', 3, 5),
         Event(1, 'backward', 0, 4), *exchanges(0, 4)],
        [(0, 0, 3, 'rank 1: backward')]),
    'stages exchange among themselves': (
        [*(Event(rank, 'forward', rank - 1, rank, 0, rank % 2)
           for rank in range(4)), *exchanges(0, 1, 2, 3)],
        [(0, 0, 2, 'rank 2: forward of micro-batch 0'),
         (1, 1, 3, 'rank 3: forward of micro-batch 0')]),
    'exchanges of which one rank has more': (
        [*exchanges(0, 2), Event(1, 'exchange', 11, 12)], []),
    'exchanges after others have ended': (
        [Event(0, 'exchange', 0, 5), Event(1, 'exchange', 9, 10)], []),
    'exchanges beside the main thread': (
        exchanges(0) + exchanges(0, 2, lane=EXCHANGE)[1:], [])}


@pytest.mark.parametrize('case', CASES)
def test_waits_are_parted_and_say_for_what(case):
    events, expected = CASES[case]
    parts = explain_waits(events[::-1])
    waits = [part for part in parts if part.name == 'wait']
    assert [(wait.rank, wait.start, wait.end, wait.about)
            for wait in waits] == expected
    for wait in waits:
        assert not wait.bytes
    assert [(part.start, part.end) for part in parts] == sorted(
        (part.start, part.end) for part in parts)
    # The rest of what waited, and all else, is as it was.
    rest = [part for part in parts if part.name != 'wait']
    whole = {event[:2] + event[3:]: event for event in events}
    for part in rest:
        assert part.start >= whole[part[:2] + part[3:]].start
    for rank in range(4):
        assert sum(part.end - part.start for part in parts
                   if part.rank == rank) == pytest.approx(sum(
                       event.end - event.start for event in events
                       if event.rank == rank))


def test_the_last_rank_is_named_in_every_made_up_update():
    for seed in range(20):
        slow = random.Random(seed).randrange(4)
        for update in MadeUpRun(slow={slow: 2.0}, epochs=1, updates=12,
                                kept=12, seed=seed).record().updates:
            found = [part for part in explain_waits(update.events)
                     if part.name == 'wait']
            assert {wait.rank for wait in found} == {*range(4)} - {slow}
            assert all(wait.about.startswith(f'rank {slow}: ')
                       for wait in found)


@settings(max_examples=60)
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 6),
       st.data())
def test_no_message_takes_longer_than_its_transfer(name, stages,
                                                   micro_batches, data):
    """Every receive is found its send, whatever the schedule."""
    chunks = (data.draw(st.integers(1, 3)) if name in (
        'interleaved', 'zero_bubble') else 1)
    schedule = make_schedule(name, stages, micro_batches, chunks)
    cost = st.floats(0.5, 2)
    events = as_measured(schedule, simulate(
        schedule, [Costs(*(data.draw(cost) for _ in range(3)))
                   for _ in range(stages * chunks)],
        Link(0.25, 1.0, [0] * schedule.last_chunk, overlapped=False)))
    parts = explain_waits(events)
    assert idle_share(parts) == pytest.approx(idle_share(events))
    for rank in range(stages):
        row = [part for part in parts if part.rank == rank]
        assert all(first.end == pytest.approx(second.start)
                   for first, second in zip(row, row[1:], strict=False))
        assert all(part.end - part.start <= 0.25 + 1e-9 for part in row
                   if part.name == 'receive')


# --- Chrome trace ------------------------------------------------------------

def rows_of(events):
    """Boxes of a trace, and names of threads in their order."""
    rows = json.loads(json.dumps(chrome_trace(events)))['traceEvents']
    names = {row['tid']: row['args']['name'] for row in rows
             if row['name'] == 'thread_name'}
    order = {row['tid']: row['args']['sort_index'] for row in rows
             if row['name'] == 'thread_sort_index'}
    return ([row for row in rows if row['ph'] == 'X'],
            {tid: names[tid] for tid in sorted(names, key=order.get)})


def test_a_trace_has_a_named_row_for_each_rank_and_times_in_microseconds():
    boxes, names = rows_of([
        Event(1, 'backward', 7.0005, 7.002, 3, 1, 12),
        Event(0, 'update', 7.0, 7.0001)])
    assert boxes == [
        {'ph': 'X', 'pid': 0, 'tid': 0, 'name': 'update', 'cat': 'update',
         'ts': 0, 'dur': 100, 'args': {'rank': 0}},
        {'ph': 'X', 'pid': 0, 'tid': 1, 'name': 'backward 3',
         'cat': 'backward', 'ts': 500, 'dur': 1500,
         'args': {'rank': 1, 'micro_batch': 3, 'chunk': 1,
                  'iteration': 12}}]
    assert names == {0: 'rank 0', 1: 'rank 1'}
    assert rows_of([]) == ([], {})


def test_boxes_of_a_row_do_not_overlap_in_a_trace():
    """A viewer would nest them; a third of a nanosecond is enough."""
    timeline = simulate(make_schedule('zero_bubble', 3, 8),
                        [Costs(1e-4 / 3, 1e-4 / 7, 1e-4 / 9)] * 3)
    boxes, _ = rows_of(timeline.events)
    assert len(boxes) == len(timeline.events)
    for rank in range(3):
        row = [box for box in boxes if box['tid'] == rank]
        assert all(round(1000 * (first['ts'] + first['dur']))
                   <= round(1000 * second['ts'])
                   for first, second in zip(row, row[1:], strict=False))


def test_threads_and_buckets_have_rows_of_their_own_below_their_rank():
    boxes, names = rows_of([
        Event(0, 'backward', 0, 4, 1, 0), Event(1, 'backward', 0, 4, 1, 0),
        Event(0, 'encode', 1, 2, lane=EXCHANGE, bytes=7),
        Event(0, 'bucket', 1, 4, lane=BUCKETS, about='W'),
        Event(0, 'bucket', 2, 3, lane=BUCKETS, about='b'),
        Event(0, 'bucket', 3, 5, lane=BUCKETS, about='c')])
    assert [*names.values()] == [
        'rank 0', 'rank 0: exchange thread', 'rank 0: buckets',
        'rank 0: buckets 1', 'rank 1']
    assert (names[0], names[1]) == ('rank 0', 'rank 1')
    found = {box['args'].get('about', box['cat']): box for box in boxes}
    assert [names[found[about]['tid']] for about in 'Wbc'] == [
        'rank 0: buckets', 'rank 0: buckets 1', 'rank 0: buckets 1']
    assert found['encode']['args'] == {
        'rank': 0, 'lane': EXCHANGE, 'bytes': 7}
