"""Which factorisation of the ranks is predicted to be best, and why."""
from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.partition.cuts import CutProblem, Wire
from chainer_fp8pipe.planning.partition.layouts import (
    GRADIENT_BYTES,
    JobRanks,
    layouts,
    table,
)
from chainer_fp8pipe.planning.partition.positions import order_of

import pytest

from ..traces import chain

FAST = Wire(0.0, 1e12)


def found(seconds, ranks, parts=4, memory=None, wire=FAST, **sizes):
    """All layouts of a chain of calls, by their stages; the best one."""
    calls, parameters = chain(*seconds, **sizes)
    task = CutProblem(1, parts, memory=memory, wire=wire)
    every = layouts(calls, order_of(calls), parameters, task, ranks)
    return {one.stages: one for one in every}, every[0]


def test_without_costs_of_sending_replicas_win_over_bubbles():
    every, best = found([1.0] * 8, JobRanks.apart(4, FAST))
    assert best.stages == 1
    assert {stages: one.replicas for stages, one in every.items()} == {
        1: 4, 2: 2, 4: 1}
    assert every[1].seconds == pytest.approx(8, rel=1e-3)
    # Two micro-batches of 8 s through two stages, one after the other.
    assert every[2].seconds == pytest.approx(3 * 4, rel=1e-3)
    assert every[4].seconds == pytest.approx(7 * 2, rel=1e-3)


def test_gradients_on_a_slow_network_make_the_pipeline_win():
    wire = Wire(0.0, 1e6)
    sizes = {'size': 1000, 'parameters': 2_000_000}
    every, best = found(
        [1.0] * 8, JobRanks.apart(4, wire), wire=wire, **sizes)
    assert best.stages == 4
    assert every[1].exchange == pytest.approx(2 * 3 / 4 * 8 * 2)
    assert every[2].exchange == pytest.approx(2 * 1 / 2 * 4 * 2)
    assert every[4].exchange == 0


def test_the_codec_decides():
    wire = Wire(0.0, 1e6)
    best = {codec: found([1.0] * 8, JobRanks.apart(4, wire, size), wire=wire,
                         parameters=1_200_000)[1].stages
            for codec, size in GRADIENT_BYTES.items()}
    assert best == {'fp8': 1, 'float16': 4, 'float32': 4}


def test_gradients_go_at_the_speed_of_busy_links():
    each = tuple(range(4))
    ranks = JobRanks(each, Cores(each), Wire(0.0, 1e6))
    every, _ = found([1.0] * 8, ranks, parameters=1_000_000)
    assert every[1].exchange == pytest.approx(2 * 3 / 4 * 8)


def test_ranks_on_common_cores_are_slower_in_all_layouts():
    pools = (0, 1, 0, 1)
    ranks = JobRanks(tuple(range(4)), Cores(pools, 1.0, (2.0, 2.0)), FAST)
    alone, _ = found([1.0] * 8, JobRanks.apart(4, FAST))
    every, best = found([1.0] * 8, ranks)
    assert best.stages == 1
    assert every[1].seconds == pytest.approx(2 * alone[1].seconds, rel=1e-3)
    for stages in (2, 4):
        assert alone[stages].seconds < every[stages].seconds < (
            2.01 * alone[stages].seconds)


def test_what_does_not_fit_says_so_in_the_table():
    every, best = found([1.0] * 8, JobRanks.apart(4, FAST), memory=3e6,
                        parameters=200_000)
    assert every[1].seconds is None
    assert best.seconds is not None
    lines = table(list(every.values())).splitlines()
    assert lines[0].split()[:3] == ['stages', 'x', 'replicas']
    assert 'no cut into 1 stages fits into 3 MB' in next(
        line for line in lines if line.startswith('1 x 4'))


def test_nothing_fits():
    _, best = found([1.0] * 8, JobRanks.apart(2, FAST), memory=1e3)
    assert best.seconds is None
    assert 'fits' in best.reason
