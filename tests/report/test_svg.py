"""Events become traces and pictures."""
import itertools
from xml.etree import ElementTree

from chainer_fp8pipe.report.stream import Event
from chainer_fp8pipe.report.svg import (
    chrome_trace,
    picture,
    timeline,
)

from .made_up_run import events as events_of_rank

UPDATE = [event for rank, factor in enumerate((1.0, 1.5, 1.0))
          for event in events_of_rank(rank, factor, 0)]


def test_a_trace_has_ranks_with_their_threads():
    lines = chrome_trace([
        Event(1, 'forward', 2.5, 3, 4, 0, bytes=7),
        Event(0, 'encode', 0, 1, beside=True), *UPDATE[:6]])['traceEvents']
    assert {(line['pid'], line['tid'], line['args']['name'])
            for line in lines if line['name'] == 'thread_name'} == {
        (0, 0, 'main'), (0, 1, 'exchange thread'), (1, 0, 'main')}
    found = {line['name']: line for line in lines if line['ph'] == 'X'}
    forward = found['forward']
    assert (forward['pid'], forward['ts'], forward['dur'], forward['args']
            ) == (1, 2500000, 500000, {
                'micro_batch': 4, 'chunk': 0, 'bytes': 7})
    assert found['encode']['tid'] == 1
    # An outer event comes before what is inside of it.
    assert [*found].index('exchange') < [*found].index('decode')


def test_a_picture_is_a_file_with_a_row_for_each_thread():
    root = ElementTree.fromstring(picture(UPDATE, '1f1b & more'))
    words = {one.text for one in root.iter() if one.tag.endswith('}text')}
    assert {'1f1b & more', 'rank 0', 'rank 1', 'rank 2', 'beside', 'forward',
            'backward', 'update', 'exchange', 'ms'} <= words
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
    assert timeline('', [Event(0, 'forward', 1, 1)]) == ''
