"""The campaign of faults counts what happened."""
import pathlib
import random
import sys

import pytest

# Benchmarks import each other from their folder.
sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks'))
import faults
import faults_kinds


def fault(kind, trains, hangs=False):
    return {'kind': kind, 'detected': 0.5, 'trains': trains, 'lost': 3,
            'hangs': hangs, 'named': not hangs}


def test_a_row_for_each_kind_has_median_and_99th_percentile():
    rows = faults.table(
        [fault('SIGKILL', seconds) for seconds in range(100)]
        + [fault('raises', None, True)],
        [{'code': 0, 'bits': True, 'left': [], 'speed': 0.5},
         {'code': 0, 'bits': False, 'left': ['process 7'], 'speed': 0.7}]
    ).splitlines()
    assert rows[1].split() == ['SIGKILL', '100', '0.50', '0.50', '49.50',
                               '99.00', '3.00', '0', '100']
    assert rows[2].split() == ['raises', '1', '0.50', '0.50', '-', '-',
                               '3.00', '1', '0']
    assert rows[3].startswith('2 runs, of which 1 ended with')
    assert '1 left something behind; speed 0.60 of' in rows[3]


@pytest.mark.parametrize('damage', [faults_kinds._cut, faults_kinds._flip])
def test_a_damaged_snapshot_is_another_one(damage):
    data = bytes(range(256)) * 8
    for seed in range(20):
        assert damage(data, random.Random(seed)) != data


def test_a_kind_that_a_job_may_survive_says_how_long_it_lasts():
    assert {name for name, kind in faults_kinds.FAULTS.items()
            if kind.lasts} == {
        'disk full', 'link 1 s', 'link slow', 'link 60 s'}
