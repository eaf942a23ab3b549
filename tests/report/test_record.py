"""Files of ranks become a record, whatever has happened to them."""
import math
import os
import re

from chainer_fp8pipe.report.record import (
    CurvePoint,
    RecordWriter,
    RunStart,
    read_record,
    written_whole,
)

import pytest

from .made_up_run import BEGAN, MadeUpRun


def test_all_ranks_parts_are_read_back(tmp_path):
    record = read_record(MadeUpRun(ranks=3).write(tmp_path))
    assert record.name == tmp_path.name
    start, = record.starts
    assert (start.ranks, start.settings['command']) == (3, 'train.py --fast')
    assert record.hosts == {0: 'host0', 1: 'host1', 2: 'host2'}
    assert record.ends[0].iteration == 61
    assert record.ended == {0, 1, 2}
    assert record.seconds == 60
    assert [point.iteration for point in record.curves] == [
        11, 21, 31, 41, 51, 61]
    assert sorted((one.rank, one.first) for one in record.intervals) == [
        (rank, 10 * n + 2) for rank in range(3) for n in range(6)]
    assert len(record.updates) == 6
    for update in record.updates:
        assert {event.rank for event in update.events} == {0, 1, 2}
    assert not record.remarks


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, 1.5])
def test_values_that_are_not_finite_are_kept(tmp_path, value):
    RecordWriter(str(tmp_path), 0).write([
        RunStart(BEGAN, 0, 1, 'a'),
        CurvePoint(BEGAN, 1, 0.1, {'main/loss': value})])
    found = read_record(str(tmp_path)).curves[0].values['main/loss']
    assert found == value or math.isnan(found) and math.isnan(value)
    assert not {'NaN', 'Infinity'} & {*re.findall(
        r'\w+', (tmp_path / 'report' / 'rank0.jsonl').read_text())}


@pytest.mark.parametrize(('launched', 'begins', 'starts', 'remarks'), [
    (True, (0, 40), 2, 0),      # went on from a snapshot
    (True, (0, 0), 2, 0),       # the launcher began anew
    (False, (0, 40), 2, 0),     # resumed by hand
    (False, (0, 0), 1, 1)])     # another training in the same folder
def test_a_second_training_in_a_folder_is_no_restart(
        tmp_path, launched, begins, starts, remarks):
    record = read_record(MadeUpRun(
        ends=('', ''), begins=begins, launched=launched).write(tmp_path))
    assert (len(record.starts), record.remarks) == (starts, [
        'The folder has 1 start of other trainings, too.'] * remarks)
    # What lies between two starts was not trained.
    assert record.seconds == 60 * starts
    places = [point.iteration for point in record.curves]
    assert places == sorted(set(places))


@pytest.mark.parametrize('cut', range(1, 400, 17))
def test_a_kill_at_any_moment_costs_one_line(tmp_path, cut):
    MadeUpRun(ranks=1).write(tmp_path)
    path = tmp_path / 'report' / 'rank0.jsonl'
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    record = read_record(str(tmp_path))
    assert len(record.remarks) <= 1
    RecordWriter(str(tmp_path), 0).write([CurvePoint(BEGAN, 99, 9.0, {})])
    assert read_record(str(tmp_path)).curves[-1].iteration == 99


@pytest.mark.parametrize('line', [
    '[]', 'nonsense', '["CurvePoint"]', '["Weather", true]', '3',
    '["RecordedUpdate", 1, 1, 1, [[0]]]', '["RecordedUpdate", 1, 1, 1, 7]'])
def test_a_damaged_line_is_left_out_with_a_remark(tmp_path, line):
    folder = MadeUpRun(ranks=1).write(tmp_path)
    with open(tmp_path / 'report' / 'rank0.jsonl', 'a') as file:
        file.write(line + '\n')
    record = read_record(folder)
    assert len(record.remarks) == 1
    assert len(record.curves) == 6


def test_ranks_whose_files_are_on_another_disk_are_named(tmp_path):
    folder = MadeUpRun(ranks=4).write(tmp_path)
    os.remove(tmp_path / 'report' / 'rank1.jsonl')
    os.remove(tmp_path / 'report' / 'rank3.jsonl')
    record = read_record(folder)
    assert 'Rank 1, 3 left no record here' in record.remarks[0]
    assert record.updates      # of the ranks that are there


@pytest.mark.parametrize('content', [
    'hello\n', '{"record of a rank": {"format": 2, "rank": 0}}\n'])
def test_what_is_no_record_is_an_error_and_is_not_written_over(
        tmp_path, content):
    (tmp_path / 'report').mkdir()
    path = tmp_path / 'report' / 'rank0.jsonl'
    path.write_text(content)
    for use in (lambda: RecordWriter(str(tmp_path), 0),
                lambda: read_record(str(tmp_path))):
        with pytest.raises(ValueError, match='move it away'):
            use()
    assert path.read_text() == content


def test_an_empty_file_of_a_start_that_was_killed_becomes_a_record(tmp_path):
    (tmp_path / 'report').mkdir()
    (tmp_path / 'report' / 'rank0.jsonl').touch()
    RecordWriter(str(tmp_path), 0).write([RunStart(BEGAN, 0, 1, 'a')])
    assert len(read_record(str(tmp_path)).starts) == 1


@pytest.mark.parametrize('fails', [False, True])
def test_a_file_is_there_whole_or_as_it_was(tmp_path, fails):
    path = tmp_path / 'file'
    path.write_text('before')
    try:
        with written_whole(path) as file:
            file.write('after')
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert path.read_text() == ('before' if fails else 'after')
    assert os.listdir(tmp_path) == ['file']
