"""Events become shares, parts of receives and a Chrome trace."""
import json
from collections import Counter

from chainer_fp8pipe.pipeline.schedules import (
    SCHEDULES,
    make_schedule,
)
from chainer_fp8pipe.planning.schedule_time import Costs, Link, simulate
from chainer_fp8pipe.report.events import (
    BUCKETS,
    EXCHANGE,
    Event,
    chrome_trace,
    idle_share,
    part_waits,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..pipeline.measured import as_measured

quick = settings(max_examples=60)


# --- idle share -------------------------------------------------------------

def test_all_but_computation_is_idle_time():
    """Two ranks for 10 s: 3 s + 1 s and 2 s + 1 s + 1 s of computation."""
    events = [Event(0, 'forward', 5, 8, 0, 0), Event(0, 'update', 14, 15),
              Event(0, 'receive', 8, 14, 0, 0),
              Event(1, 'backward', 6, 8, 0, 1), Event(1, 'wait', 8, 9),
              Event(1, 'backward_weight', 9, 10, 0, 1),
              Event(1, 'recompute', 10, 11, 0, 1),
              Event(1, 'exchange', 11, 12),
              # Beside the main thread, and after all that is there.
              Event(1, 'encode', 11, 20, lane=EXCHANGE),
              Event(0, 'bucket', 11, 30, lane=BUCKETS)]
    assert idle_share(events) == pytest.approx(1 - 8 / 20)


@pytest.mark.parametrize('events', [
    [], [Event(0, 'forward', 1, 1)], [Event(0, 'forward', 1, 3)]])
def test_nothing_is_idle_where_nothing_waits(events):
    assert idle_share(events) == 0


# --- parts of receives ------------------------------------------------------

def test_a_receive_waits_until_its_message_is_sent():
    activation = [Event(0, 'forward', 0, 4, 0, 0),
                  Event(0, 'send', 4, 5, 0, 0),
                  Event(1, 'receive', 1, 6, 0, 1),
                  Event(1, 'forward', 6, 7, 0, 1)]
    gradient = [Event(1, 'backward', 7, 9, 0, 1),
                Event(1, 'send', 9, 10, 0, 1),
                Event(0, 'receive', 5, 11, 0, 0),
                Event(0, 'backward', 11, 13, 0, 0)]
    parts = part_waits(gradient + activation)
    assert [part for part in parts if part.name in ('wait', 'receive')] == [
        Event(1, 'wait', 1, 4, 0, 1), Event(1, 'receive', 4, 6, 0, 1),
        Event(0, 'wait', 5, 9, 0, 0), Event(0, 'receive', 9, 11, 0, 0)]
    others = Counter(gradient + activation) - Counter(parts)
    assert {event.name for event in others} == {'receive'}


@pytest.mark.parametrize(('sent', 'expected'), [
    (0.5, [('receive', 1, 6)]),     # long ago: the message was there
    (1, [('receive', 1, 6)]),
    (8, [('wait', 1, 6)]),          # clocks that do not agree quite
])
def test_a_receive_of_one_kind_stays_in_one_piece(sent, expected):
    events = [Event(0, 'forward', 0, 0.25, 0, 0),
              Event(0, 'send', sent, sent + 0.1, 0, 0),
              Event(1, 'receive', 1, 6, 0, 1),
              Event(1, 'forward', 6, 7, 0, 1)]
    assert [part[1:4] for part in part_waits(events)
            if part.rank == 1 and part.name != 'forward'] == expected


def test_a_receive_without_its_send_stays_as_it_is():
    events = [Event(1, 'receive', 1, 6, 0, 1), Event(1, 'forward', 6, 7, 0, 1)]
    assert part_waits(events) == events


def test_a_receive_that_took_no_time_is_kept():
    events = [Event(1, 'receive', 1, 1, 0, 1), Event(1, 'forward', 1, 2, 0, 1)]
    assert part_waits(events) == events


def test_replicas_hear_from_their_own_neighbour():
    """Ranks 0 and 1 are replicas of the first stage, 2 and 3 of the last."""
    events = []
    for replica, sent in enumerate((4, 5)):
        events += [Event(replica, 'forward', 0, sent, 0, 0),
                   Event(replica, 'send', sent, sent + 0.5, 0, 0),
                   Event(2 + replica, 'receive', 1, 6, 0, 1),
                   Event(2 + replica, 'forward', 6, 7, 0, 1)]
    assert [part[:4] for part in part_waits(events) if part.name == 'wait'
            ] == [(2, 'wait', 1, 4), (3, 'wait', 1, 5)]


def test_iterations_are_told_apart_by_their_order():
    events = []
    for start in (0, 100):
        events += [Event(0, 'forward', start, start + 4, 0, 0),
                   Event(0, 'send', start + 4, start + 5, 0, 0),
                   Event(1, 'receive', start + 1, start + 6, 0, 1),
                   Event(1, 'forward', start + 6, start + 7, 0, 1)]
    assert [part[1:4] for part in part_waits(events) if part.name == 'wait'
            ] == [('wait', 1, 4), ('wait', 101, 104)]


@quick
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
    parts = part_waits(events)
    assert idle_share(parts) == pytest.approx(idle_share(events))
    for rank in range(stages):
        row = [part for part in parts if part.rank == rank]
        assert all(first.end == pytest.approx(second.start)
                   for first, second in zip(row, row[1:], strict=False))
        assert all(part.end - part.start <= 0.25 + 1e-9 for part in row
                   if part.name == 'receive')


# --- Chrome trace -----------------------------------------------------------

def test_a_trace_has_a_named_row_for_each_rank_and_times_in_microseconds():
    trace = json.loads(json.dumps(chrome_trace([
        Event(1, 'backward', 7.0005, 7.002, 3, 1, 12),
        Event(0, 'update', 7.0, 7.0001)])))
    assert trace['displayTimeUnit'] == 'ms'
    boxes = [row for row in trace['traceEvents'] if row['ph'] == 'X']
    assert boxes == [
        {'ph': 'X', 'pid': 0, 'tid': 0, 'name': 'update', 'cat': 'update',
         'ts': 0, 'dur': 100, 'args': {'rank': 0}},
        {'ph': 'X', 'pid': 0, 'tid': 1, 'name': 'backward 3',
         'cat': 'backward', 'ts': 500, 'dur': 1500,
         'args': {'rank': 1, 'micro_batch': 3, 'chunk': 1,
                      'iteration': 12}}]
    names = {row['tid']: row['args']['name'] for row in trace['traceEvents']
             if row['name'] == 'thread_name'}
    order = {row['tid']: row['args']['sort_index']
             for row in trace['traceEvents']
             if row['name'] == 'thread_sort_index'}
    assert names == {0: 'rank 0', 1: 'rank 1'}
    assert order == {0: 0, 1: 1}


def test_boxes_of_a_row_do_not_overlap_in_a_trace():
    """A viewer would nest them; a third of a nanosecond is enough."""
    timeline = simulate(make_schedule('zero_bubble', 3, 8),
                        [Costs(1e-4 / 3, 1e-4 / 7, 1e-4 / 9)] * 3)
    boxes = [row for row in chrome_trace(timeline.events)['traceEvents']
             if row['ph'] == 'X']
    assert len(boxes) == len(timeline.events)
    for rank in range(3):
        row = [box for box in boxes if box['tid'] == rank]
        assert all(round(1000 * (first['ts'] + first['dur']))
                   <= round(1000 * second['ts'])
                   for first, second in zip(row, row[1:], strict=False))


def test_a_trace_of_nothing_is_a_trace():
    assert json.loads(json.dumps(chrome_trace([])))['traceEvents'][0][
        'ph'] == 'M'


def test_threads_and_buckets_have_rows_of_their_own_below_their_rank():
    trace = chrome_trace([
        Event(0, 'backward', 0, 4, 1, 0), Event(1, 'backward', 0, 4, 1, 0),
        Event(0, 'encode', 1, 2, lane=EXCHANGE, bytes=7),
        Event(0, 'bucket', 1, 4, lane=BUCKETS, about='W'),
        Event(0, 'bucket', 2, 3, lane=BUCKETS, about='b'),
        Event(0, 'bucket', 3, 5, lane=BUCKETS, about='c')])['traceEvents']
    names = {row['tid']: row['args']['name'] for row in trace
             if row['name'] == 'thread_name'}
    order = {row['tid']: row['args']['sort_index'] for row in trace
             if row['name'] == 'thread_sort_index'}
    assert [names[tid] for tid in sorted(names, key=order.get)] == [
        'rank 0', 'rank 0: exchange thread', 'rank 0: buckets',
        'rank 0: buckets 1', 'rank 1']
    assert (names[0], names[1]) == ('rank 0', 'rank 1')
    found = {row['args'].get('about', row['cat']): row for row in trace
             if row['ph'] == 'X'}
    assert [names[found[about]['tid']] for about in 'Wbc'] == [
        'rank 0: buckets', 'rank 0: buckets 1', 'rank 0: buckets 1']
    assert found['encode']['args'] == {
        'rank': 0, 'lane': EXCHANGE, 'bytes': 7}


def test_a_chrome_trace_has_whole_updates_and_says_what_it_leaves_out():
    events = [Event(rank, 'forward', number + 0.1 * part,
                    number + 0.1 * part + 0.05, iteration=number)
              for number in range(5, 9) for rank in range(2)
              for part in range(3)]
    trace = chrome_trace(events, most=13)
    assert Counter(row['args']['iteration'] for row in trace['traceEvents']
                   if row['ph'] == 'X') == {5: 6, 6: 6}
    assert trace['otherData'] == {
        'left out': '12 events of updates 7, 8: there are 13 at most'}
    assert 'otherData' not in chrome_trace(events)


def test_a_chrome_trace_has_one_update_however_large():
    events = [Event(0, 'forward', place, place + 1) for place in range(9)]
    assert len([row for row in chrome_trace(events, most=3)['traceEvents']
                if row['ph'] == 'X']) == 9
