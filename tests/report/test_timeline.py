"""Events become shares, waits with their causes, traces and pictures."""
import itertools
import re
from xml.etree import ElementTree

from chainer_fp8pipe.report.stream import BUCKETS, EXCHANGE, Event
from chainer_fp8pipe.report.timeline import (
    chrome_trace,
    draw_timeline,
    idle_share,
    look_of,
    part_waits,
    picture,
)

import pytest

from .made_up_run import events as events_of_rank

IDLE = [Event(0, 'forward', 5, 8, 0, 0), Event(0, 'update', 14, 15),
        Event(0, 'receive', 8, 14, 0, 0), Event(1, 'backward', 6, 8, 0, 1),
        Event(1, 'wait', 8, 9), Event(1, 'backward_weight', 9, 10, 0, 1),
        Event(1, 'recompute', 10, 11, 0, 1), Event(1, 'exchange', 11, 12),
        # Beside the main thread, and after all that is there.
        Event(1, 'encode', 11, 20, lane=EXCHANGE),
        Event(0, 'bucket', 11, 30, lane=BUCKETS)]
UPDATE = [event for rank, factor in enumerate((1.0, 1.5, 1.0))
          for event in events_of_rank(rank, factor, 0)]


@pytest.mark.parametrize(('events', 'share'), [
    ([], 0), ([Event(0, 'forward', 1, 1)], 0),
    ([Event(0, 'forward', 1, 3)], 0),
    # Two ranks for 10 s: 3 s + 1 s and 2 s + 1 s + 1 s of computation.
    (IDLE, 1 - 8 / 20)])
def test_all_but_computation_is_idle_time(events, share):
    assert idle_share(events) == pytest.approx(share)


def exchanges(*starts, end=10, lane='', chunk=None):
    return [one for rank, start in enumerate(starts) for one in (
        Event(rank, 'forward', 0, start, 0, chunk and chunk[rank]),
        Event(rank, 'exchange', start, end, lane=lane, bytes=9))]


#: Events, and of each wait: its rank, start, end and cause.
@pytest.mark.parametrize(('events', 'waits'), [
    (exchanges(1, 4, 2), [(0, 1, 4, 'rank 1'), (2, 2, 4, 'rank 1')]),
    (exchanges(3, 3), []),
    # Exchanges beside backward, of which nothing is known.
    (exchanges(1, 4, lane=EXCHANGE), []),
    # Replicas of two stages exchange among themselves.
    (exchanges(1, 2, 3, 5, chunk=(0, 1, 0, 1)), [
        (0, 1, 3, 'rank 2'), (1, 2, 5, 'rank 3')]),
    # Encoding inside of it is no waiting.
    ([*exchanges(1, 6), Event(0, 'encode', 1, 3)], [(0, 3, 6, 'rank 1')]),
    # And is not cut in two where the last rank comes meanwhile.
    ([*exchanges(1, 6), Event(0, 'encode', 3, 7)], []),
    # Ranks with other numbers of exchanges.
    ([*exchanges(1, 4), Event(0, 'exchange', 11, 12)], []),
    # One that ended before the last began was another.
    ([Event(0, 'exchange', 1, 2), Event(1, 'exchange', 5, 6)], [])])
def test_an_exchange_waits_for_its_last_rank(events, waits):
    parts = part_waits(events)
    assert [(one.rank, one.start, one.end, one.about) for one in parts
            if one.name == 'wait'] == waits
    for name in {one.name for one in events} - {'exchange'}:
        assert {one for one in parts if one.name == name} == {
            one for one in events if one.name == name}
    for one, other in itertools.permutations(parts, 2):
        if (one.rank, one.lane) == (other.rank, other.lane):
            assert not one.start < other.start < one.end < other.end
    for rank in {one.rank for one in events}:
        assert sum(one.end - one.start for one in parts
                   if one.rank == rank) == pytest.approx(sum(
                       one.end - one.start for one in events
                       if one.rank == rank))


def test_a_trace_has_ranks_with_rows_in_which_nothing_overlaps():
    lines = chrome_trace([
        *(Event(0, 'bucket', start, start + 2, lane=BUCKETS, about='W')
          for start in (0, 1, 2)),
        Event(0, 'encode', 0, 1, lane=EXCHANGE, values=(('q', 0.5),)),
        Event(1, 'forward', 2.5, 3, 4, 0, 7)])['traceEvents']
    assert {(line['pid'], line['tid'], line['args']['name'])
            for line in lines if line['name'] == 'thread_name'} == {
        (0, 1, EXCHANGE), (0, 2, f'{BUCKETS} 0'), (0, 3, f'{BUCKETS} 1'),
        (1, 0, 'main')}
    found = {}
    for line in lines:
        if line['ph'] == 'X':
            found.setdefault((line['pid'], line['tid']), []).append(line)
    forward, = found[1, 0]
    assert (forward['name'], forward['ts'], forward['dur'], forward['args']
            ) == ('forward 4', 2500000, 500000, {
                'micro_batch': 4, 'chunk': 0, 'iteration': 7})
    assert found[0, 1][0]['args'] == {'q': 0.5}
    for its in found.values():
        for one, other in itertools.pairwise(its):
            assert one['ts'] + one['dur'] <= other['ts']


def test_a_picture_is_a_file_whose_boxes_hide_none_of_another():
    text = picture(UPDATE, '1f1b & more')
    root = ElementTree.fromstring(text)
    words = {one.text for one in root.iter() if one.tag.endswith('}text')}
    assert any(re.fullmatch(r'1f1b & more \(ranks idle [0-9.]+ %\)', one)
               for one in words)
    assert {'rank 0', 'rank 1', 'rank 2', 'forward', 'backward', 'update',
            'exchange', 'waiting', 'ms'} <= words
    boxes = [(float(one.get('y')), float(one.get('x')),
              float(one.get('width'))) for one in root.iter()
             if one.tag.endswith('}rect') and len(one)]
    assert len(boxes) == len(part_waits(UPDATE))
    for one, other in itertools.combinations(boxes, 2):
        if one[0] == other[0]:
            first, second = sorted((one[1:], other[1:]))
            assert first[0] + first[1] <= second[0] + 0.02


def test_chunks_of_a_rank_have_shades_and_nothing_is_drawn_of_nothing():
    figure = draw_timeline('', [Event(0, 'forward', n, n + 1, 0, n)
                                for n in range(3)])
    colours = re.findall('fill="(#[0-9a-f]{6})"><title>', figure)
    assert len(set(colours)) == 3
    assert colours[0] == look_of('forward')[1]
    assert draw_timeline('', [Event(0, 'forward', 1, 1)]) == ''
