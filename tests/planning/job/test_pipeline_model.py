"""Predicted steps of pipelines take what arithmetic says."""
import dataclasses
import math

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.step import StepModel

import pytest

from .jobs import SAMPLES, codecs, figures, job
from .steps import cut


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
@pytest.mark.parametrize(('stages', 'micro_batches'), [
    (2, 2), (2, 8), (4, 4), (4, 8)])
def test_equal_stages_take_the_formula_of_pipelines(
        schedule, stages, micro_batches):
    """(m + d - 1) / m of the time of a stage (the paper's equation 2)."""
    model = figures(*[10.0] * 4, parameters=400)
    profile = job(model, (0,) * stages, Cores(tuple(range(stages))))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, stages, micro_batches, schedule, SAMPLES))
    whole = 40.0
    assert found.seconds.value == pytest.approx(
        (micro_batches + stages - 1) / micro_batches * whole / stages,
        rel=1e-3)
    assert found.parts['forward and backward'] == pytest.approx(
        whole / stages, rel=1e-3)
    assert found.parts['exchange'] == 0


def test_each_part_beside_the_calls_counts_once_for_what_it_is():
    model = figures(*[10.0] * 4, update=Figure(.4), rest=Figure(.01),
                    step=Figure(.02), micro_batch=Figure(.05),
                    ghost=Figure(.01))
    profile = job(model, (0, 0))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    # A stage passes by the two calls of the other one.
    assert found.parts['forward and backward'] == pytest.approx(
        20 + 4 * (.05 + 2 * .01), rel=1e-3)
    assert found.parts['update'] == pytest.approx(.2)
    assert found.parts['other'] == pytest.approx(.03)


def test_stages_of_late_ranks_take_longer():
    profile = job(figures(*[10.0] * 4), (0, 0))
    way = cut(profile, 2, 4, '1f1b', SAMPLES)
    late = StepModel(dataclasses.replace(profile, straggling=1.1), SAMPLES)
    assert late.predict(way).seconds.value == pytest.approx(
        1.1 * StepModel(profile, SAMPLES).predict(way).seconds.value)


def test_chunks_of_a_rank_pay_for_a_micro_batch_once():
    model = figures(*[10.0] * 4, micro_batch=Figure(.5))
    profile = job(model, (0, 0))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, 'interleaved', SAMPLES))
    assert found.parts['forward and backward'] == pytest.approx(
        20 + 4 * .5, rel=1e-3)


def test_stages_with_few_parameters_leave_the_core_to_the_others():
    model = figures(*[10.0] * 3, parameters=400, update=Figure(.3))
    profile = job(model, (0, 0), Cores((0, 0), 1.0, (2.0,)))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    assert found.parts['update'] == pytest.approx(.3)
    apart = job(model, (0, 1))
    assert StepModel(apart, SAMPLES).predict(
        cut(apart, 2, 4, '1f1b', SAMPLES)).parts['update'] == (
            pytest.approx(.2))


@pytest.mark.parametrize(('hosts', 'seconds'), [
    ((0, 1), .8), ((0, 1, 2), .8 * 17 / 16), ((0, 0, 1), .8)])
def test_a_batch_is_handed_on_from_stage_to_stage(hosts, seconds):
    model = figures(*[10.0] * 3, sample_bytes=1e6)
    profile = job(model, hosts, rate=1e7, local_rate=Figure(math.inf))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, len(hosts), 4, '1f1b', SAMPLES))
    assert found.parts['other'] == pytest.approx(seconds)


def test_replicas_of_a_pipeline_average_what_each_stage_has():
    model = figures(*[.01] * 4, parameters=4_000_000)
    profile = job(model, (0, 0, 1, 1), rate=1e7,
                  local_rate=Figure(math.inf), codec=codecs(update=.003))
    way = cut(profile, 2, 4, '1f1b', 32)
    found = StepModel(profile, 32).predict(way)
    # Two stages of a host send half of the vector each, through one port.
    assert found.parts['exchange'] == pytest.approx(
        4 * 4_000_000 / 1e7 + .003, rel=.05)


def test_stages_on_one_core_leave_no_bubble():
    model = figures(*[10.0] * 4)
    profile = job(model, (0, 0), Cores((0, 0), 1.0, (2.0,)))
    found = StepModel(profile, SAMPLES).predict(
        cut(profile, 2, 4, '1f1b', SAMPLES))
    assert found.seconds.value == pytest.approx(40.0, rel=1e-3)
