"""A long record becomes coarser, within a limit, and what it says stays."""
import json

from chainer_fp8pipe.report.diagnosis import diagnose
from chainer_fp8pipe.report.page.phase_bars import mean_phases
from chainer_fp8pipe.report.records.record_lines import json_line
from chainer_fp8pipe.report.records.record_reader import read_record
from chainer_fp8pipe.report.records.record_shortening import shortened
from chainer_fp8pipe.report.records.record_writer import RecordWriter
from chainer_fp8pipe.report.records.run_record import (
    ClockReading,
    CurvePoint,
    LinkReading,
    MemoryReading,
    RankInterval,
    RunStart,
    SentBytes,
    Spread,
    TensorHealth,
)

import pytest

START = RunStart(0, 1000.0, 0, 2, ('a', 'b'))
LIMIT = 60_000


def interval(rank, first, last, own=1.0, start=0, **phases):
    spread = Spread(0.9 * own, own, 1.5 * own, own, 3 * own)
    return RankInterval(start, rank, first, last, spread, spread,
                        phases or {'forward': own}, {'encode': own},
                        1000 * own, 10 * own, 20 * own)


def of_a_write(number, start=0):
    """What two ranks have at a write, ten updates after the one before."""
    last = 10 * number
    for rank in range(2):
        own = 1.0 + rank + number % 7
        yield interval(rank, last - 9, last, own, start)
        yield SentBytes(start, rank, last, 'fp8', 'between nodes', 10, 40)
        yield MemoryReading(start, rank, last, float(last), 5, 6)
        yield LinkReading(start, last, rank, 1 - rank, 1e8, 1e-4, False)
    yield ClockReading(start, 1, float(last), 100.0, 1e-5)
    yield CurvePoint(start, last, number / 3, float(last), {'loss': own})
    yield TensorHealth(start, last, '/l/W', 9, {'scale': 0.5})


@pytest.fixture
def long(tmp_path):
    """The folder of a record of 1,000 writes, which would have 1 MB."""
    writer = RecordWriter(str(tmp_path), most_bytes=LIMIT)
    writer.write([START], 0.0)
    sizes = []
    for number in range(1, 1001):
        writer.write(of_a_write(number), float(number))
        sizes.append((tmp_path / 'report' / 'record.jsonl').stat().st_size)
    assert max(sizes) <= LIMIT
    assert sizes[-1] > LIMIT // 4
    return tmp_path


def test_a_record_is_no_longer_than_its_limit_and_all_kinds_stay(long):
    record = read_record(str(long))
    assert record.starts == [START]
    assert record.last_seen == 1000.0
    assert record.remarks == []
    for parts in (record.intervals, record.sent, record.memory, record.links,
                  record.clocks, record.curves, record.tensors):
        assert len(parts) >= 16
    assert [entry.name for entry in (long / 'report').iterdir()
            if entry.name.endswith('.partial')] == []


def test_the_newest_parts_are_as_they_were(long):
    record = read_record(str(long))
    expected = [part for number in range(985, 1001)
                for part in of_a_write(number)]
    for kind, parts in ((RankInterval, record.intervals),
                        (LinkReading, record.links),
                        (CurvePoint, record.curves),
                        (MemoryReading, record.memory)):
        newest = [part for part in expected if isinstance(part, kind)]
        assert parts[-len(newest):] == newest
    whole = type(record)('', [START], intervals=[
        part for part in expected if isinstance(part, RankInterval)])
    assert ([finding.text for finding in diagnose(record)]
            == [finding.text for finding in diagnose(whole)] != [])


def test_intervals_stay_without_gaps_and_their_means_are_those_of_all(long):
    record = read_record(str(long))
    for rank in range(2):
        mine = [one for one in record.intervals if one.rank == rank]
        assert mine[0].first == 1
        assert mine[-1].last == 10_000
        for one, other in zip(mine, mine[1:], strict=False):
            assert other.first == one.last + 1
        every = [1.0 + rank + number % 7 for number in range(1, 1001)]
        mean = sum(every) / len(every)
        assert mean_phases(mine, lambda one: one.phases) == pytest.approx(
            {'forward': mean})
        weights = [one.last - one.first + 1 for one in mine]
        assert sum(weight * one.bytes for weight, one in zip(
            weights, mine, strict=True)) / sum(weights) == pytest.approx(
                1000 * mean)
        assert max(one.step.most for one in mine) == 3 * max(every)


def lines(*parts):
    names = {RunStart: 'start', RankInterval: 'interval',
             CurvePoint: 'point', LinkReading: 'link'}
    return [(names[type(part)], json.loads(json_line('', part._asdict()))[''])
            for part in parts]


def found(text, name):
    return [fields for line in text for key, fields in json.loads(
        line).items() if key == name]


def test_two_intervals_become_their_mean_weighted_by_updates():
    old = interval(0, 1, 10, 1.0, forward=1.0), interval(
        0, 11, 40, 2.0, forward=1.5, update=0.5)
    new = [interval(0, 31 + 10 * number, 40 + 10 * number)
           for number in range(1, 17)]
    one, *rest = found(shortened(lines(START, *old, *new), 0), 'interval')
    assert (one['first'], one['last']) == (1, 40)
    # 10 updates and 30.
    assert one['phases'] == pytest.approx({'forward': 1.375, 'update': 0.375})
    assert one['hidden'] == {'encode': 1.75}
    assert one['step'] == pytest.approx([1.575, 1.75, 2.625, 1.75, 6.0])
    assert (one['bytes'], one['stage_bytes'], one['stage_arrays']) == (
        1750, 17.5, 35)
    assert rest == [fields for _, fields in lines(*new)]


def test_points_become_their_mean_and_values_of_one_stay():
    """Each value counts for the updates since the point before."""
    old = [CurvePoint(0, iteration, 0.0, 0.0, values)
           for iteration, values in (
               (110, {'a': 1.0}), (120, {'a': 3.0}), (130, {'a': 1.0}),
               (160, {'a': 5.0, 'b': 7.0}))]
    new = [CurvePoint(0, 160 + number, 0.0, 0.0, {'a': float(number)})
           for number in range(1, 17)]
    one, *rest = found(shortened(lines(
        START._replace(iteration=100), *old, *new), 0), 'point')
    assert one['iteration'] == 160
    assert one['values'] == pytest.approx({'a': 200 / 60, 'b': 7.0})
    assert rest == [fields for _, fields in lines(*new)]


def test_of_an_old_start_little_stays_and_its_links_may_all_go():
    parts = [START, *(interval(0, 10 * number + 1, 10 * number + 10)
                      for number in range(9)),
             *(LinkReading(0, number, 0, 1, 1.0, 1.0, False)
               for number in range(9)), START._replace(number=1)]
    text = shortened(lines(*parts), 0)
    assert len(found(text, 'start')) == 2
    one, = found(text, 'interval')
    assert (one['first'], one['last']) == (1, 90)
    assert not found(text, 'link')


def test_what_is_short_enough_stays():
    parts = lines(START, *(interval(0, number, number)
                           for number in range(1, 50)))
    whole = [json_line(name, fields) for name, fields in parts]
    assert shortened(parts, sum(map(len, whole))) == whole


def test_a_record_that_cannot_become_short_is_not_shortened_at_each_write(
        tmp_path, monkeypatch):
    writer = RecordWriter(str(tmp_path), most_bytes=1000)
    writer.write([START], 0.0)
    calls = []
    module = 'chainer_fp8pipe.report.records.record_writer'
    monkeypatch.setattr(f'{module}.shortened', lambda *arguments: calls.append(
        1) or shortened(*arguments))
    for number in range(1, 101):
        writer.write(of_a_write(number), float(number))
    assert len(read_record(str(tmp_path)).intervals) >= 32
    assert 1 <= len(calls) < 20


def test_a_record_of_before_is_shortened_when_it_goes_on(tmp_path):
    writer = RecordWriter(str(tmp_path))
    writer.write([START], 0.0)
    for number in range(1, 201):
        writer.write(of_a_write(number), float(number))
    writer = RecordWriter(str(tmp_path), most_bytes=LIMIT)
    assert writer.starts == 1
    writer.write([START._replace(number=1)], 2000.0)
    assert (tmp_path / 'report' / 'record.jsonl').stat().st_size <= LIMIT
    record = read_record(str(tmp_path))
    assert len(record.starts) == 2
    assert record.last_seen == 2000.0
    assert record.intervals[-1].last == 2000
