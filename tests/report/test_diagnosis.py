"""Slow ranks and stages are named, and healthy ones are not."""
from chainer_fp8pipe.report.diagnosis import diagnose
from chainer_fp8pipe.report.record import read_record

import pytest

from .made_up_run import MadeUpRun

TWO_STAGES = {'stages': (0, 1, 0, 1)}


@pytest.mark.parametrize(('options', 'kind', 'ranks', 'said'), [
    ({'slow': {2: 1.5}}, 'slow rank', (2,),
     'Rank 2 on host2 is slow: its own work takes 1.50 times as long'),
    ({'slow': {0: 1.3}, 'noise': 0.02}, 'slow rank', (0,), 'is slow'),
    ({'slow': {1: 1.4, 3: 1.4}, **TWO_STAGES}, 'slow stage', (1, 3),
     'Stage 1 of the pipeline'),
    ({'slow': {2: 1.5}, **TWO_STAGES}, 'slow rank', (2,), 'Rank 2'),
    ({'phases': {'input': 8e-3}}, 'input', None, 'waits for batches')])
def test_what_is_slow_is_named_and_nothing_else(
        tmp_path, options, kind, ranks, said):
    found = diagnose(read_record(MadeUpRun(**options).write(tmp_path)))
    assert [one.kind for one in found] == [kind]
    assert said in found[0].text
    if ranks:
        assert found[0].ranks == ranks
    assert found[0].figure > 0.1


@pytest.mark.parametrize('seed', range(5))
def test_an_even_run_raises_no_alarm(tmp_path, seed):
    for options in {}, TWO_STAGES, {'ranks': 2}, {'ranks': 1}:
        folder = tmp_path / str(len(options)) / str(options.get('ranks'))
        assert not diagnose(read_record(MadeUpRun(
            noise=0.05, seed=seed, **options).write(folder)))


def test_only_the_last_start_counts(tmp_path):
    MadeUpRun(slow={1: 2.0}, ends=(None,)).write(tmp_path)
    folder = MadeUpRun(ends=('', ''), begins=(0, 20)).write(tmp_path / 'b')
    assert diagnose(read_record(str(tmp_path)))
    assert not diagnose(read_record(folder))


def test_a_record_without_updates_says_nothing(tmp_path):
    assert not diagnose(read_record(MadeUpRun(intervals=0).write(tmp_path)))
