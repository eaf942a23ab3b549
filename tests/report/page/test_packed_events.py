"""Packed events are those that were given, whatever their number."""
import base64
import zlib

from chainer_fp8pipe.report.events import BUCKETS, EXCHANGE, Event
from chainer_fp8pipe.report.page.packed_events import PackedEvents

import numpy
import pytest

KINDS = ('<f8', '<u4', '<u4', '<i4', '<i4', '<i4', '<u2', '<u2')
NAMES = ('bytes', 'start', 'length', 'text', 'micro_batch', 'chunk', 'row',
         'look')


def unpack(update):
    data = zlib.decompress(base64.b64decode(update['columns']))
    place, columns = 0, {}
    for name, kind in zip(NAMES, KINDS, strict=True):
        columns[name] = numpy.frombuffer(data, kind, update['count'], place)
        place += columns[name].nbytes
    assert place == len(data)
    return columns


def test_times_sizes_and_texts_come_back():
    packed = PackedEvents()
    columns = unpack(packed.add('update 7', [
        Event(0, 'forward', 5.0, 5.25, 3, 1),
        Event(1, 'exchange', 5.5, 6.0, bytes=7 * 10 ** 12, about='/l1/W')]))
    unit = 1e-7
    assert columns['start'] * unit == pytest.approx([0, 0.5])
    assert columns['length'] * unit == pytest.approx([0.25, 0.5])
    assert columns['bytes'].tolist() == [0, 7e12]
    assert columns['micro_batch'].tolist() == [3, -1]
    assert columns['chunk'].tolist() == [1, -1]
    assert columns['text'].tolist() == [-1, 0]
    assert packed.texts == ['/l1/W']
    assert [packed.looks[look]['label'] for look in columns['look']] == [
        'forward', 'collective communication']


def test_an_update_of_hours_is_packed_as_well():
    update = PackedEvents().add('', [
        Event(0, 'forward', 0.0, 1.0), Event(0, 'update', 9e3, 1e4)])
    columns = unpack(update)
    assert columns['start'] * update['unit'] == pytest.approx(
        [0, 9e3], abs=1e-5)


def test_rows_of_a_rank_do_not_lie_upon_each_other():
    update = PackedEvents().add('', [
        Event(1, 'forward', 0, 1), Event(1, 'encode', 0, 1, lane=EXCHANGE),
        Event(1, 'bucket', 0, 1, lane=BUCKETS),
        Event(1, 'bucket', 0.5, 2, lane=BUCKETS),
        Event(2, 'forward', 0, 1)])
    rows = update['rows']
    assert [row['lane'] for row in rows] == ['', EXCHANGE, BUCKETS, BUCKETS,
                                             '']
    assert all(above['bottom'] < below['top']
               for above, below in zip(rows, rows[1:], strict=False))
    assert [row['rank'] for row in rows] == [1, 1, 1, 1, 2]


def test_a_look_and_a_text_are_kept_once_for_all_updates():
    packed = PackedEvents()
    for _ in range(3):
        packed.add('', [Event(0, 'forward', 0, 1, about='all of it')])
    assert len(packed.looks) == len(packed.texts) == 1
