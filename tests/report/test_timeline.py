"""Events become shares, traces and pictures."""
import itertools
import re
from xml.etree import ElementTree

from chainer_fp8pipe.report.stream import Event
from chainer_fp8pipe.report.timeline import (
    chrome_trace,
    draw_timeline,
    idle_share,
    picture,
)

import pytest

from .made_up_run import events as events_of_rank

IDLE = [Event(0, 'forward', 5, 8, 0, 0), Event(0, 'update', 14, 15),
        Event(0, 'receive', 8, 14, 0, 0), Event(1, 'backward', 6, 8, 0, 1),
        Event(1, 'backward_weight', 9, 10, 0, 1),
        Event(1, 'recompute', 10, 11, 0, 1), Event(1, 'exchange', 11, 12),
        # Beside the main thread, and after all that is there.
        Event(1, 'encode', 11, 20, beside=True)]
UPDATE = [event for rank, factor in enumerate((1.0, 1.5, 1.0))
          for event in events_of_rank(rank, factor, 0)]


@pytest.mark.parametrize(('events', 'share'), [
    ([], 0), ([Event(0, 'forward', 1, 1)], 0),
    ([Event(0, 'forward', 1, 3)], 0),
    # Two ranks for 10 s: 3 s + 1 s and 2 s + 1 s + 1 s of computation.
    (IDLE, 1 - 8 / 20)])
def test_all_but_computation_is_idle_time(events, share):
    assert idle_share(events) == pytest.approx(share)


def test_a_trace_has_ranks_with_their_threads():
    lines = chrome_trace([
        Event(1, 'forward', 2.5, 3, 4, 0, bytes=7),
        Event(0, 'encode', 0, 1, beside=True), *UPDATE[:6]])['traceEvents']
    assert {(line['pid'], line['tid'], line['args']['name'])
            for line in lines if line['name'] == 'thread_name'} == {
        (0, 0, 'main'), (0, 1, 'exchange thread'), (1, 0, 'main')}
    found = {line['name']: line for line in lines if line['ph'] == 'X'}
    forward = found['forward 4']
    assert (forward['pid'], forward['ts'], forward['dur'], forward['args']
            ) == (1, 2500000, 500000, {
                'micro_batch': 4, 'chunk': 0, 'bytes': 7})
    assert found['encode']['tid'] == 1
    # An outer event comes before what is inside of it.
    assert [*found].index('exchange') < [*found].index('decode')


def test_a_picture_is_a_file_with_a_row_for_each_thread():
    root = ElementTree.fromstring(picture(UPDATE, '1f1b & more'))
    words = {one.text for one in root.iter() if one.tag.endswith('}text')}
    assert any(re.fullmatch(r'1f1b & more \(ranks idle [0-9.]+ %\)', one)
               for one in words)
    assert {'rank 0', 'rank 1', 'rank 2', 'beside', 'forward', 'backward',
            'update', 'exchange', 'ms'} <= words
    boxes = [one for one in root.iter() if one.tag.endswith('}rect')
             and len(one)]
    assert len(boxes) == len(UPDATE)
    rows = itertools.groupby(sorted(
        (float(one.get('y')), float(one.get('x')), float(one.get('width')))
        for one in boxes), key=lambda box: box[0])
    found = [[box[1:] for box in its] for _, its in rows]
    assert [len(its) for its in found] == 3 * [5, 1]
    order = [one[0].text.split(',')[0] for one in boxes]
    for rank in range(3):       # in front of what it is inside of
        assert order.index(f'rank {rank}: exchange') < order.index(
            f'rank {rank}: decode')


def test_nothing_is_drawn_of_nothing():
    assert draw_timeline('', [Event(0, 'forward', 1, 1)]) == ''
