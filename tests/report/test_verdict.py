"""A run in a few lines, whose figures have one base."""
import json
import math

from chainer_fp8pipe.report.record import (
    CurvePoint,
    RunRecord,
    read_record,
)
from chainer_fp8pipe.report.verdict import PARTS, rows, text, verdict

import pytest

from .made_up_run import SECONDS, MadeUpRun


def of(tmp_path, **options):
    return verdict(read_record(MadeUpRun(**options).write(tmp_path)))


def test_the_parts_of_an_update_add_up_to_it(tmp_path):
    found = of(tmp_path, slow={1: 1.4}, noise=0.1)
    assert sum(cost['seconds'] for cost in found['costs']) == pytest.approx(
        found['update'])
    assert sum(cost['share'] for cost in found['costs']) == pytest.approx(1)
    even = of(tmp_path / 'even')
    assert even['update'] == pytest.approx(sum(SECONDS.values()))
    assert even['bytes'] == {'gradients': 1e6, 'in_float32': 4e6,
                             'to_stages': 0.0}


@pytest.mark.parametrize(('ends', 'died', 'said'), [
    (('',), 0, 'Nothing died: one start.'),
    ((None,), 0, 'One start, which has no end: it runs, or was killed.'),
    (('ValueError: x',), 1, 'One start, which crashed: ValueError: x.'),
    ((None, ''), 1, '2 starts: 1 crashed or was killed.'),
    (('', ''), 0, 'Nothing died: 2 starts.'),
    (('E: e', None, None), 2,
     '3 starts: 2 crashed or were killed; the last one has no end: it runs, '
     'or was killed.')])
def test_how_starts_ended(tmp_path, ends, died, said):
    found = of(tmp_path, ends=ends,
               begins=tuple(30 * place for place in range(len(ends))))
    assert (found['died'], found['endings']) == (died, said)
    assert found['starts'] == len(ends)


def test_the_result_is_the_mean_of_the_last_readings():
    record = RunRecord('run', curves=[
        CurvePoint(n, n / 10, n, {'main/loss': float(n)})
        for n in range(100)])
    found = verdict(record)
    assert found['final'] == {'main/loss': 97.0}        # of 95 to 99
    assert found['averaged'] == {'main/loss': 5}
    record.curves[-1].values['main/loss'] = math.nan
    assert verdict(record)['final'] == {'main/loss': None}
    assert 'not finite' in text(verdict(record))


@pytest.mark.parametrize(('phases', 'said'), [
    ({'exchange': 60e-3}, 'exchange, 61.4 ms or'),
    ({'between': 60e-3}, 'work between updates, 60 ms or'),
    ({'other': 60e-3}, 'other, 60 ms or'),
    ({}, 'forward and backward, 17 ms or')])
def test_the_costliest_part_is_named(tmp_path, phases, said):
    lines = dict(rows(of(tmp_path, phases=phases)))
    assert lines['costs most'].startswith(said)


@pytest.mark.parametrize('options', [
    {}, {'intervals': 0}, {'ends': (None,)}, {'stages': (0, 1, 0, 1)}])
def test_every_verdict_is_json_and_text(tmp_path, options):
    found = of(tmp_path, **options)
    json.dumps(found, allow_nan=False)
    assert text(found).splitlines()[0] == tmp_path.name


def test_every_part_has_its_remedy():
    for what, (phases, remedy) in PARTS.items():
        assert phases
        assert remedy or what == 'exchange'
