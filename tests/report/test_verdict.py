"""A run in a few lines, whose figures have one base."""
import math

from chainer_fp8pipe.report.record import (
    CurvePoint,
    RecordWriter,
    RunRecord,
    RunStart,
    read_record,
)
from chainer_fp8pipe.report.verdict import diagnose, text, verdict

import pytest

from .made_up_run import BEGAN, SECONDS, MadeUpRun


def lines_of(tmp_path, **options):
    return dict(verdict(read_record(MadeUpRun(**options).write(tmp_path))))


def test_figures_are_means_over_ranks_and_updates(tmp_path):
    found = lines_of(tmp_path)
    assert sum(SECONDS.values()) == pytest.approx(24.5e-3)
    assert found['an update'].startswith('24.5 ms')
    assert found['a rank sends in it'] == (
        '1 MB of gradients (float32: 4 MB)')
    assert found['training'] == '61 updates, 6 epochs'
    assert found['time'] == '60 s on 4 ranks of 4 hosts'


@pytest.mark.parametrize(('ends', 'said'), [
    (('',), '1 start: nothing died.'),
    ((None,), '1 start: the last one runs, or was killed.'),
    (('ValueError: x',), '1 start: the last one crashed: ValueError: x.'),
    ((None, ''), '2 starts: 1 crashed or killed.'),
    (('', ''), '2 starts: nothing died.'),
    (('E: e', None, None), '3 starts: 2 crashed or killed; the last one runs, '
     'or was killed.')])
def test_how_starts_ended(tmp_path, ends, said):
    found = lines_of(tmp_path, ends=ends,
                     begins=tuple(30 * n for n in range(len(ends))))
    assert found['starts'] == said


def test_the_result_is_the_mean_of_the_last_readings():
    record = RunRecord('run', curves=[
        CurvePoint(n, n, n / 10, {'main/loss': float(n)})
        for n in range(100)])
    assert dict(verdict(record))['main'] == (
        'loss 97 (mean of the last 5 readings)')        # of 95 to 99
    record.curves[-1].values['main/loss'] = math.nan
    assert 'loss not finite' in text(record)


@pytest.mark.parametrize(('phases', 'said'), [
    ({'exchange': 60e-3}, 'exchange, 61.4 ms or'),
    ({'input': 60e-3}, 'reading batches, 60 ms or'),
    ({'between': 60e-3}, 'work between updates, 60 ms or'),
    ({'other': 60e-3}, 'other, 60 ms or'),
    ({}, 'forward and backward, 17 ms or 69.4 % of it. More ranks')])
def test_the_costliest_part_is_named(tmp_path, phases, said):
    assert lines_of(tmp_path, phases=phases)['costs most'].startswith(said)


def test_bytes_of_warm_up_say_so(tmp_path):
    for warmup, said in ('0', False), ('1', False), ('2', True):
        assert ('of warm-up' in lines_of(tmp_path / warmup, warmup=warmup)[
            'a rank sends in it']) == said


# --- who is slow -------------------------------------------------------------

TWO_STAGES = {'stages': (0, 1, 0, 1)}


@pytest.mark.parametrize(('options', 'said'), [
    ({'slow': {2: 1.5}},
     'Rank 2 on host2 is slow: its own work takes 1.50 times as long'),
    ({'slow': {0: 1.3}, 'noise': 0.02}, 'Rank 0 on host0 is slow'),
    ({'slow': {1: 1.4, 3: 1.4}, **TWO_STAGES}, 'Stage 1 of the pipeline'),
    ({'slow': {2: 1.5}, **TWO_STAGES}, 'Rank 2 on host2 is slow'),
    ])
def test_what_is_slow_is_named_and_nothing_else(tmp_path, options, said):
    found, = diagnose(read_record(MadeUpRun(**options).write(tmp_path)))
    assert said in found


@pytest.mark.parametrize('seed', range(5))
def test_an_even_run_raises_no_alarm(tmp_path, seed):
    for options in {}, TWO_STAGES, {'ranks': 2}, {'ranks': 1}, {
            'intervals': 0}, {'slow': {2: 1.3}, 'phases': {'exchange': 1.0}}:
        folder = tmp_path / str(options)
        assert not diagnose(read_record(MadeUpRun(
            noise=0.05, seed=seed, **options).write(folder)))


def test_only_the_last_start_counts(tmp_path):
    MadeUpRun(slow={1: 2.0}, ends=(None,)).write(tmp_path)
    assert diagnose(read_record(str(tmp_path)))
    for rank in range(4):
        RecordWriter(str(tmp_path), rank).write([
            RunStart(BEGAN + 500, 61, 4, 'a')])
    assert not diagnose(read_record(str(tmp_path)))
