"""A record survives kills, stays within its limits, and is read back."""
import dataclasses
import json

from chainer_fp8pipe.report.events import EXCHANGE, Event
from chainer_fp8pipe.report.record import (
    FIRST,
    PHASES,
    REGULAR,
    SLOW,
    ClockReading,
    CurvePoint,
    RankInterval,
    RecordedUpdate,
    RunEnd,
    RunRecord,
    RunStart,
    Spread,
    measured_parts,
)
from chainer_fp8pipe.report.record_file import (
    RecordWriter,
    is_record,
    read_record,
)

import pytest

from .made_up_run import MadeUpRun

PARTS = ('starts', 'ends', 'curves', 'intervals', 'sent', 'clocks', 'links',
         'tensors', 'memory', 'plans')
START = RunStart(0, 1000.0, 0, 2, ('a', 'b'), origin=50.0)


def written(record, folder, **options):
    """The writer of a record whose events are on rank 0's clock."""
    writer = RecordWriter(str(folder), **options)
    for name in PARTS:
        writer.write(getattr(record, name), record.last_seen)
    writer.write_updates(record.updates)
    return writer


def update(iteration, why=REGULAR, events=10, start=0):
    return RecordedUpdate(start, iteration, why, tuple(
        Event(0, 'forward', 50.0 + place, 50.5 + place, iteration=iteration)
        for place in range(events)))


def kept(folder):
    return [(one.iteration, one.why) for one in read_record(folder).updates]


def place(event):
    """Events that begin at once are read in any order."""
    return event.rank, event.lane, event.name, event.about, event.start


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
        for event, expected in zip(sorted(one.events, key=place), sorted(
                other.events, key=place), strict=True):
            assert event[:2] + event[4:] == expected[:2] + expected[4:]
            assert event[2:4] == pytest.approx(expected[2:4], abs=2e-7)


def test_all_kinds_of_events_are_read_back(tmp_path):
    events = (Event(1, 'forward', 51.0, 51.5, 0, 3, 7),
              Event(0, 'encode', 51.0, 52.0, None, None, 7, EXCHANGE, 9),
              Event(0, 'compression', 53.0, 53.0, iteration=7, about='/l/W',
                    values=(('q', 0.25), ('clipped', float('inf')))))
    writer = RecordWriter(str(tmp_path))
    writer.write([START], 0.0)
    writer.write_updates([RecordedUpdate(0, 7, FIRST, events)])
    found, = read_record(str(tmp_path)).updates
    assert sorted(found.events) == sorted(
        event._replace(start=event.start - 50, end=event.end - 50)
        for event in events)


def test_events_are_put_on_rank_0s_clock(tmp_path):
    """Rank 1's clock is 100 s ahead at first, and 101 s ten seconds later."""
    writer = RecordWriter(str(tmp_path))
    writer.write([START, ClockReading(0, 1, 0.0, 100.0, 1e-5),
                  ClockReading(0, 1, 10.0, 101.0, 1e-5)], 0.0)
    writer.write_updates([RecordedUpdate(0, 1, FIRST, (
        Event(0, 'forward', 55.0, 56.0, iteration=1),
        Event(1, 'forward', 155.5, 156.5, iteration=1)))])
    one, other = read_record(str(tmp_path)).updates[0].events
    assert (one.start, one.end) == pytest.approx((5.0, 6.0))
    assert (other.start, other.end) == pytest.approx((5.0, 6.0))


@pytest.mark.parametrize('cut', range(1, 200, 7))
def test_a_kill_at_any_moment_costs_one_line(tmp_path, cut):
    """The next start appends to what the kill has left."""
    record = MadeUpRun(name='run', epochs=2, kept=1).record()
    folder = tmp_path / 'run'
    written(record, folder)
    for name in 'record.jsonl', 'events.jsonl':
        path = folder / 'report' / name
        path.write_bytes(path.read_bytes()[:-cut])
    writer = RecordWriter(str(folder))
    assert writer.starts == 1
    writer.write([START._replace(number=1)], 2e9)
    writer.write_updates([update(9, start=1)])
    found = read_record(str(folder))
    assert len(found.starts) == 2
    assert found.last_seen == 2e9
    assert found.curves == [
        point for point in record.curves if point.iteration <= 0]
    assert len(found.updates) >= len(record.updates)
    assert found.updates[-1].iteration == 9
    assert len(found.remarks) <= 2
    for remark in found.remarks:
        assert 'is not whole' in remark


def test_points_that_a_restart_went_back_behind_are_no_part_of_the_curve(
        tmp_path):
    points = [CurvePoint(0, number, 0.0, 0.0, {'loss': 1.0})
              for number in (10, 20, 30)]
    again = [CurvePoint(1, number, 0.0, 0.0, {'loss': 2.0})
             for number in (25, 35)]
    RecordWriter(str(tmp_path)).write(
        [START, *points, START._replace(number=1, iteration=20), *again], 0.0)
    found = read_record(str(tmp_path)).curves
    assert [(point.start, point.iteration) for point in found] == [
        (0, 10), (0, 20), (1, 25), (1, 35)]


def test_values_that_are_not_finite_are_read_back(tmp_path):
    point = CurvePoint(0, 1, 0.0, 0.0, {'a': float('inf'), 'b': float('nan')})
    RecordWriter(str(tmp_path)).write([START, point], 0.0)
    found, = read_record(str(tmp_path)).curves
    assert found.values['a'] == float('inf')
    assert found.values['b'] != found.values['b']


# --- limits ------------------------------------------------------------------

def test_the_number_of_events_is_bounded_and_whole_updates_go(tmp_path):
    writer = RecordWriter(str(tmp_path), most_events=100)
    writer.write([START], 0.0)
    writer.write_updates([update(1, FIRST)])
    for number in range(2, 100):
        if number == 50:        # a job that goes on keeps to the limit
            writer = RecordWriter(str(tmp_path), most_events=100)
        writer.write_updates(
            [update(number, SLOW if number == 60 else REGULAR)])
        found = read_record(str(tmp_path))
        assert sum(len(one.events) for one in found.updates) <= 100
        assert all(len(one.events) == 10 for one in found.updates)
        assert found.left_out + len(found.updates) == number
        assert found.updates[0].why == FIRST
        assert found.updates[-1].iteration == number


def test_an_update_larger_than_the_limit_is_kept_alone(tmp_path):
    written(RunRecord('', [START], updates=[update(1), update(2, SLOW, 300)]),
            tmp_path, most_events=100)
    assert kept(str(tmp_path)) == [(2, SLOW)]


# --- what is no record -------------------------------------------------------

@pytest.mark.parametrize(('content', 'said'), [
    ('', ''), ('hello\n', 'not a record of a run'),
    ('{"a": 1}\n', 'not a record of a run'), ('[1]\n', 'not a record'),
    ('{"record of a run":{"format":2}}\n', 'format 2')])
def test_what_is_no_record_is_an_error_that_names_the_file(
        tmp_path, content, said):
    (tmp_path / 'report').mkdir()
    path = tmp_path / 'report' / 'record.jsonl'
    path.write_text(content)
    if not content:
        assert not read_record(str(tmp_path)).starts
        return
    with pytest.raises(ValueError, match=said) as error:
        read_record(str(tmp_path))
    assert 'record.jsonl' in str(error.value)


@pytest.mark.parametrize(('name', 'line'), [
    *(('record.jsonl', line) for line in (
        '{"start":{"number":0}}', '{"seen":{}}', '{"seen":[1]}',
        '{"seen":null}', '{"start":[1, 2]}', '{"clock":7}',
        '{"end":{"start":"0","time":1.0,"iteration":2}}',
        '{"end":{"start":0,"time":null,"iteration":2}}',
        '{"interval":{"step":[1],"own":[2]}}',
        '{"point":{"start":0,"iteration":1,"epoch":0.5,"seconds":1.0,'
        '"values":{"loss":"high"}}}',
        '{"point":{"start":0,"iteration":1,"epoch":0.5,"seconds":1.0,'
        '"values":[1]}}')),
    *(('events.jsonl', line) for line in (
        '{"update":{"start":0,"iteration":2}}', '{"update":[0]}',
        '{"update":{"start":[],"iteration":2}}',
        '{"update":{"start":0,"iteration":2,"why":"slow","events":[[1]]}}',
        '{"left_out":{}}', '{"left_out":{"updates":"many"}}'))])
def test_a_damaged_line_is_left_out_with_a_remark(tmp_path, name, line):
    written(RunRecord('', [START], updates=[update(1)]), tmp_path)
    whole = read_record(str(tmp_path))
    with open(tmp_path / 'report' / name, 'a') as file:
        file.write(line + '\n')
    found = read_record(str(tmp_path))
    remark, = found.remarks
    assert name in remark
    assert 'left out' in remark
    assert dataclasses.replace(found, remarks=[]) == whole


def test_events_of_a_start_that_has_no_line_are_left_out(tmp_path):
    written(RunRecord('', [START], updates=[update(1)]), tmp_path)
    path = tmp_path / 'report' / 'events.jsonl'
    path.write_text(path.read_text().replace('"start":0', '"start":7'))
    record = read_record(str(tmp_path))
    assert not record.updates
    assert ['start 7' in remark for remark in record.remarks] == [True]


def test_an_empty_file_of_a_start_that_was_killed_becomes_a_record(tmp_path):
    (tmp_path / 'report').mkdir()
    for name in 'record.jsonl', 'events.jsonl':
        (tmp_path / 'report' / name).touch()
    written(RunRecord('', [START]), tmp_path)
    assert len(read_record(str(tmp_path)).starts) == 1


def test_nothing_is_written_over_a_file_that_is_no_record(tmp_path):
    (tmp_path / 'report').mkdir()
    path = tmp_path / 'report' / 'record.jsonl'
    path.write_text("somebody's\n")
    with pytest.raises(ValueError, match='choose another result folder'):
        RecordWriter(str(tmp_path))
    assert path.read_text() == "somebody's\n"


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


@pytest.mark.parametrize('content', ['', '{}', '[1]', '[{"epoch": 1}]',
                                     '{"a": {}}'])
def test_a_log_that_is_none_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / 'log').write_text(content)
    if content == '{}':     # an empty log is one
        assert not read_record(str(tmp_path)).curves
        return
    with pytest.raises(ValueError, match='is not a log of LogReport'):
        read_record(str(tmp_path))


def test_a_record_is_found_from_its_own_folder_as_well(tmp_path):
    written(RunRecord('', [START], ends=[RunEnd(0, 1.0, 5)]), tmp_path)
    assert read_record(str(tmp_path / 'report')) == read_record(
        str(tmp_path))


# --- measured parts ----------------------------------------------------------

def interval(rank, last, median, **phases):
    spread = Spread(*[median] * 5)
    return RankInterval(0, rank, 1, last, spread, spread, phases)


def test_the_slowest_ranks_newest_phases_become_parts():
    assert measured_parts([
        interval(0, 10, 9.0, update=9.0),
        interval(0, 20, 1.0, update=1.0),
        interval(1, 20, 2.0, forward=1.0, backward=2.0, recompute=4.0,
                 encode=8.0, exchange=16.0, input=32.0, between=64.0)]) == {
        'forward and backward': 7.0, 'exchange': 24.0, 'other': 96.0}


def test_each_phase_is_in_one_part():
    whole = measured_parts([interval(0, 1, 1.0, **dict.fromkeys(
        PHASES, 1.0))])
    assert sum(whole.values()) == len(PHASES)


def test_without_intervals_there_are_no_parts():
    assert measured_parts([]) == {}
