"""A record survives kills, stays within its limits, and is read back."""
import contextlib
import dataclasses
import json
import math
import os
import random
from unittest import mock

from chainer_fp8pipe.mpi.measured import RoundTrip, best_trip
from chainer_fp8pipe.report import record as module
from chainer_fp8pipe.report.events import EXCHANGE, Event
from chainer_fp8pipe.report.record import (
    RECORD,
    ClockReading,
    CurvePoint,
    RecordedUpdate,
    RecordWriter,
    RunRecord,
    RunStart,
    clock_offset,
    is_record,
    read_record,
    written_whole,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .made_up_run import MadeUpRun

LISTS = ('starts', 'curves', 'intervals', 'clocks', 'links', 'tensors',
         'updates', 'ends')
START = RunStart(0, 1000.0, 0, 2, ('a', 'b'), origin=50.0)


def written(record, folder):
    """The writer of a record whose events are on rank 0's clock."""
    writer = RecordWriter(str(folder))
    for name in LISTS:
        writer.write(getattr(record, name), record.last_seen)
    return writer


def update(iteration, events=10, start=0):
    return RecordedUpdate(start, iteration, False, tuple(
        Event(0, 'forward', 50.0 + place, 50.5 + place, iteration=iteration)
        for place in range(events)))


def in_order(events):
    """Events that begin at once are read in any order."""
    return sorted(events, key=lambda event: (
        event.rank, event.lane, event.name, event.about, event.start))


def test_all_parts_are_read_back(tmp_path):
    record = MadeUpRun(name='run', ranks_per_host=4, overlaps=True,
                       dies_at=(130,)).record()
    written(record, tmp_path / 'run')
    found = read_record(str(tmp_path / 'run'))
    for field in dataclasses.fields(RunRecord):
        if field.name != 'updates':
            assert getattr(found, field.name) == getattr(record, field.name)
    for one, other in zip(found.updates, record.updates, strict=True):
        assert one[:3] == other[:3]
        for event, expected in zip(in_order(one.events), in_order(
                other.events), strict=True):
            assert event[:2] + event[4:] == (expected[:2] + (
                expected._replace(iteration=None)[4:]))
            assert event[2:4] == pytest.approx(expected[2:4], abs=2e-7)


def test_all_kinds_of_events_and_values_are_read_back(tmp_path):
    events = (Event(1, 'forward', 51.0, 51.5, 0, 3, 7),
              Event(0, 'encode', 51.0, 52.0, None, None, 7, EXCHANGE, 9),
              Event(0, 'compression', 53.0, 53.0, iteration=7, about='/l/W',
                    values=(('q', 0.25), ('clipped', float('inf')))))
    point = CurvePoint(0, 1, 0.0, 0.0, {'a': float('inf'), 'b': float('nan')})
    RecordWriter(str(tmp_path)).write(
        [START, point, RecordedUpdate(0, 7, True, events)], 0.0)
    found = read_record(str(tmp_path))
    assert sorted(found.updates[0].events) == sorted(
        event._replace(start=event.start - 50, end=event.end - 50,
                       iteration=None) for event in events)
    assert found.curves[0].values['a'] == float('inf')
    assert math.isnan(found.curves[0].values['b'])


def test_points_that_a_restart_went_back_behind_are_no_part_of_the_curve(
        tmp_path):
    points = [CurvePoint(start, number, 0.0, 0.0, {}) for start, number in (
        (0, 10), (0, 20), (0, 30), (1, 25), (1, 35))]
    RecordWriter(str(tmp_path)).write(
        [START, START._replace(number=1, iteration=20), *points], 0.0)
    found = read_record(str(tmp_path)).curves
    assert [point[:2] for point in found] == [
        (0, 10), (0, 20), (1, 25), (1, 35)]


@pytest.mark.parametrize('cut', [1, 2, 30, 150, 700])
def test_a_kill_at_any_moment_costs_one_line(tmp_path, cut):
    """The next start appends to what the kill has left."""
    record = MadeUpRun(name='run', epochs=2, kept=1).record()
    written(record, tmp_path / 'run')
    path = tmp_path / 'run' / RECORD
    path.write_bytes(path.read_bytes()[:-cut])
    writer = RecordWriter(str(tmp_path / 'run'))
    assert writer.starts == 1
    writer.write([START._replace(number=1), update(9, start=1)], 2e9)
    found = read_record(str(tmp_path / 'run'))
    assert len(found.starts) == 2
    assert found.last_seen == 2e9
    assert found.updates[-1].iteration == 9
    assert len(found.updates) >= len(record.updates)
    assert len(found.remarks) <= 1
    assert all('is not whole' in remark for remark in found.remarks)


# --- clocks ------------------------------------------------------------------

@given(st.floats(-1e6, 1e6), st.lists(st.tuples(
    st.floats(0, 1e-3), st.floats(0, 1e-3)), min_size=1, max_size=30))
def test_the_offset_is_right_to_half_of_the_shortest_round_trip(
        ahead, delays):
    """However unequal the ways there and back are."""
    best = best_trip([
        RoundTrip(number, number + there + ahead, number + there + back)
        for number, (there, back) in enumerate(delays)])
    assert best.error == pytest.approx(min(map(sum, delays)) / 2, abs=1e-9)
    assert abs(best.offset - ahead) <= best.error + 1e-9


def test_events_are_put_on_rank_0s_clock(tmp_path):
    """Rank 1's clock is 100 s ahead at first, and 101 s ten seconds later."""
    RecordWriter(str(tmp_path)).write([
        START, ClockReading(0, 1, 0.0, 100.0, 1e-5),
        ClockReading(0, 1, 10.0, 101.0, 1e-5), RecordedUpdate(0, 1, False, (
            Event(0, 'forward', 55.0, 56.0), Event(1, 'forward', 155.5, 156.5)
        ))], 0.0)
    one, other = read_record(str(tmp_path)).updates[0].events
    assert (one.start, one.end) == pytest.approx((5.0, 6.0))
    assert (other.start, other.end) == pytest.approx((5.0, 6.0))


def test_offsets_go_along_a_line_and_stay_before_and_after():
    readings = [ClockReading(0, 1, time, 5 + 0.1 * time, 0.0)
                for time in (10, 20)]
    assert [clock_offset(readings, own) for own in (0.0, 21.5, 100.0)] == (
        pytest.approx([6, 6.5, 7]))
    assert clock_offset([], 3.0) == 0


def test_events_are_aligned_to_a_tenth_of_a_millisecond_while_clocks_drift():
    """50 runs: 50 ppm apart, and up to 2 ppm more or less as rooms warm up.

    Readings are 10 minutes apart, over ways of 150 us that differ by a half.
    """
    day = 86400 / 2 / math.pi
    for seed in range(50):
        draw = random.Random(seed)
        ahead, rate = draw.uniform(-1e4, 1e4), draw.uniform(-50e-6, 50e-6)
        swing, phase = draw.uniform(0, 2e-6), draw.uniform(0, 6)

        def offset(time, ahead=ahead, rate=rate, swing=swing, phase=phase):
            return (ahead + rate * time
                    + swing * day * math.sin(time / day + phase))
        found = []
        for number in range(20):
            trips = []
            for _ in range(16):
                asked = 600.0 * number + draw.random()
                there, back = (draw.uniform(37e-6, 112e-6) for _ in 'ab')
                trips.append(RoundTrip(
                    asked, asked + there + offset(asked + there),
                    asked + there + back))
            best = best_trip(trips)
            found.append(ClockReading(0, 1, best.asked, best.offset,
                                      best.error))
        for _ in range(50):
            time = draw.uniform(found[0].seconds, found[-1].seconds)
            own = time + offset(time)
            assert abs(own - clock_offset(found, own) - time) < 1e-4


# --- limits ------------------------------------------------------------------

def test_the_number_of_events_is_bounded_and_whole_updates_go(tmp_path):
    with mock.patch.object(module, 'MOST_EVENTS', 100):
        writer = RecordWriter(str(tmp_path))
        writer.write([START], 0.0)
        for number in range(1, 60):
            if number == 30:        # a job that goes on keeps to the limit
                writer = RecordWriter(str(tmp_path))
            writer.write([update(number)], 0.0)
            found = read_record(str(tmp_path))
            assert sum(len(one.events) for one in found.updates) <= 100
            assert all(len(one.events) == 10 for one in found.updates)
            assert found.left_out + len(found.updates) == number
            assert found.updates[-1].iteration == number
    assert found.left_out
    assert len(found.starts) == 1


def replaced(path):
    with written_whole(path) as file:
        file.write('ä')
        file.flush()
        assert path.read_text() == 'before'
    return 'ä'


def kept_after_an_error(path):
    with contextlib.suppress(KeyError), written_whole(path) as file:
        file.write('half')
        raise KeyError
    return 'before'


def written_by_two(path):
    with written_whole(path) as file:
        file.write('parent')
        child = os.fork()
        if not child:
            with written_whole(path) as other:
                other.write('child')
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_text() == 'child'
    return 'parent'


@pytest.mark.parametrize('write', [replaced, kept_after_an_error,
                                   written_by_two])
def test_a_file_is_there_whole_or_as_it_was(tmp_path, write):
    path = tmp_path / 'file'
    path.write_text('before')
    expected = write(path)
    assert path.read_text(encoding='utf-8') == expected
    assert [*tmp_path.iterdir()] == [path]


# --- what is no record -------------------------------------------------------

@pytest.mark.parametrize(('content', 'said'), [
    ('hello\n', 'not a record of a run'), ('[1]\n', 'not a record'),
    ('{"a": 1}\n', 'not a record of a run'),
    ('{"record of a run":{"format":2}}\n', 'format 2')])
def test_what_is_no_record_is_an_error_and_is_not_written_over(
        tmp_path, content, said):
    path = tmp_path / RECORD
    path.write_text(content)
    for use in read_record, RecordWriter:
        with pytest.raises(ValueError, match=f'{RECORD}.*{said}'):
            use(str(tmp_path))
    assert path.read_text() == content


@pytest.mark.parametrize('line', [
    '{"start":{"number":0}}', '{"seen":{}}', '{"seen":[1]}', '{"seen":null}',
    '{"start":[1, 2]}', '{"clock":7}',
    '{"end":{"start":"0","time":1.0,"iteration":2}}',
    '{"end":{"start":0,"time":null,"iteration":2}}',
    '{"interval":{"step":[1],"own":[2]}}',
    '{"point":{"start":0,"iteration":1,"epoch":0.5,"seconds":1.0,'
    '"values":{"loss":"high"}}}',
    '{"point":{"start":0,"iteration":1,"epoch":0.5,"seconds":1.0,'
    '"values":[1]}}',
    '{"update":{"start":0,"iteration":2}}', '{"update":[0]}',
    '{"update":{"start":[],"iteration":2}}',
    '{"update":{"start":0,"iteration":2,"is_slow":true,"events":[[1]]}}',
    '{"update":{"start":0,"iteration":2,"is_slow":true,"events":[["0","f",'
    '1.0,2.0]]}}',
    '{"left_out":{}}', '{"left_out":{"updates":"many"}}'])
def test_a_damaged_line_is_left_out_with_a_remark(tmp_path, line):
    written(RunRecord('', [START], updates=[update(1)]), tmp_path)
    whole = read_record(str(tmp_path))
    with open(tmp_path / RECORD, 'a') as file:
        file.write(line + '\n')
    found = read_record(str(tmp_path))
    remark, = found.remarks
    assert RECORD in remark
    assert 'left out' in remark
    assert dataclasses.replace(found, remarks=[]) == whole


def test_an_empty_file_of_a_start_that_was_killed_becomes_a_record(tmp_path):
    (tmp_path / RECORD).touch()
    assert not read_record(str(tmp_path)).starts
    written(RunRecord('', [START]), tmp_path)
    assert len(read_record(str(tmp_path)).starts) == 1


def test_a_folder_without_a_record_is_an_error_with_a_remedy(tmp_path):
    assert not is_record(str(tmp_path))
    with pytest.raises(ValueError, match=r'trainer.extend\(RunReport'):
        read_record(str(tmp_path))
    with pytest.raises(ValueError, match='is not a folder'):
        read_record(str(tmp_path / 'absent'))


def test_a_log_of_log_report_alone_gives_curves(tmp_path):
    (tmp_path / 'log').write_text(json.dumps([
        {'main/loss': 2.0, 'epoch': 1, 'iteration': 10, 'elapsed_time': 3.5},
        {'main/loss': 1.0, 'epoch': 2, 'iteration': 20, 'elapsed_time': 7.0,
         'note': 'text'}]))
    assert is_record(str(tmp_path))
    record = read_record(str(tmp_path))
    assert record.curves == [
        CurvePoint(0, 10, 1, 3.5, {'main/loss': 2.0}),
        CurvePoint(0, 20, 2, 7.0, {'main/loss': 1.0})]
    assert not record.starts
    assert 'only the log' in record.remarks[0]


@pytest.mark.parametrize('content', ['', '[1]', '[{"epoch": 1}]',
                                     '{"a": {}}'])
def test_a_log_that_is_none_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / 'log').write_text(content)
    with pytest.raises(ValueError, match='is not a log of LogReport'):
        read_record(str(tmp_path))
