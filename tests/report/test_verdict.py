"""The verdict: what came out of a run, in numbers and in words."""
import json

from chainer_fp8pipe.report.record import (
    CurvePoint,
    RankInterval,
    RunEnd,
    RunRecord,
    RunStart,
)
from chainer_fp8pipe.report.verdict import text, verdict

import pytest

from .made_up_run import MadeUpRun

START = RunStart(0, 0.0, 0, 2, ('a', 'b'))


@pytest.mark.parametrize(('endings', 'said'), [
    ([''], 'Nothing died: one start.'),
    (['OSError: full'], 'One start, which crashed: OSError: full.'),
    ([None], 'One start, which has no end: it runs, or was killed.'),
    (['', ''], 'Nothing died: 2 starts.'),
    ([None, 'OSError: full', ''], '3 starts: 2 crashed or were killed.'),
    ([None, None], '2 starts: 1 crashed or was killed; the last one has no '
     'end: it runs, or was killed.')])
def test_how_starts_ended(endings, said):
    record = RunRecord('a', [START._replace(number=number)
                             for number in range(len(endings))])
    record.ends = [RunEnd(number, 1e9, 100, error)
                   for number, error in enumerate(endings)
                   if error is not None]
    assert verdict(record)['endings'] == said


def interval(rank, first, last, median, sent=(0.0, 0.0), **phases):
    return RankInterval(0, rank, first, last, (median,) * 3, (median,) * 3,
                        phases, sent={'between nodes': ('fp8', *sent)})


def run(*intervals, **options):
    return RunRecord('r', [START._replace(options=options)],
                     intervals=[*intervals])


def test_the_result_is_the_mean_of_the_last_readings():
    record = RunRecord('r', curves=[
        CurvePoint(0, number, number / 10, 0.0, {
            'main/loss': 100.0 if number < 95 else number,
            'main/lr': 1.0}) for number in range(100)])
    record.curves[-1].values['val/accuracy'] = 0.5
    record.curves[-1].values['val/loss'] = float('nan')
    found = verdict(record)
    assert found['final'] == {
        'main/loss': 97.0, 'val/accuracy': 0.5, 'val/loss': None}
    assert [*found['final']][0] == 'val/accuracy'
    assert (found['updates'], found['epochs']) == (99, 9.9)
    assert 'accuracy 50 %, loss not finite' in text(found)
    assert 'loss 97 (mean of the last 5 readings)' in text(found)


def test_an_update_is_that_of_the_slowest_rank_and_bytes_are_means():
    found = verdict(run(
        interval(0, 1, 10, 1.0, (100.0, 400.0), forward=1.0),
        interval(1, 1, 10, 3.0, (100.0, 400.0), forward=1.0),
        interval(0, 11, 40, 2.0, (20.0, 400.0), forward=1.0),
        interval(1, 11, 40, 2.5, (20.0, 400.0), forward=1.0)))
    assert found['update'] == 2.75
    assert found['bytes'] == {
        'gradients': 40.0, 'in_float32': 400.0, 'to_stages': 0.0}


@pytest.mark.parametrize(('options', 'phases', 'said'), [
    ({}, {'forward': 3.0, 'input': 1.0},
     ['forward and backward, 3 s or 75 %', 'reading batches, 1 s or 25 %']),
    ({}, {'forward': 3.0, 'input': 0.1}, ['forward and backward']),
    ({}, {'input': 3.0, 'forward': 1.0}, ['reading batches']),
    ({'communicator': 'float32'}, {'exchange': 3.0, 'decode': 1.0},
     ["exchange, 4 s or 100 % of the mean update. Between "
      "hosts 'fp8'"]),
    ({'communicator': 'fp8', 'overlap': 'False'}, {'exchange': 3.0},
     ['overlap=True']),
    ({'communicator': 'fp8', 'overlap': 'True'}, {'exchange': 3.0},
     ['plan" measures'])])
def test_the_costliest_part_has_a_remedy(options, phases, said):
    found = verdict(run(interval(0, 1, 9, 1.0, **phases), **options))
    lines = [line for line in text(found).splitlines()
             if line.startswith('  costs most')]
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line
    assert sum(one['share'] for one in found['costs']) == pytest.approx(1.0)


def test_every_verdict_is_json_and_text():
    for record in (RunRecord('r'), RunRecord('r', [START]),
                   MadeUpRun(dies_at=(100,), slow={2: 2.0}).record()):
        found = verdict(record)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert text(found).startswith(record.name)
    assert (found['starts'], found['died']) == (2, 1)
    assert 'Rank 2 on node1 is slow' in text(found)
