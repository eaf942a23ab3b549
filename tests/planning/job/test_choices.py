"""The search for the fastest way to run a job, against trying all of them."""
import dataclasses
import json

from chainer_fp8pipe.planning.job import choices
from chainer_fp8pipe.planning.job.choices import (
    Choices,
    Wanted,
    kinds,
    kinds_of,
)
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.pipeline_model import PipelineModel
from chainer_fp8pipe.planning.job.step import StepModel
from chainer_fp8pipe.planning.partition.cuts import CutProblem, DoesNotFit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .jobs import SAMPLES, codecs, figures, job, jobs
from .test_configuration import cut

some = settings(max_examples=max(settings.default.max_examples // 10, 1))

LINKS = {'rate': 2e7, 'latency': 1e-4, 'local_rate': Figure(1e9),
         'codec': codecs(5e8, 1e-3, 1e-5)}
MODEL = figures(*[.01] * 8, parameters=400_000, size=3200, kept=40_000,
                update=Figure(.002), optimizer_arrays=2)
FOUR = job(MODEL, (0, 0, 1, 1), overhead=1e6, **LINKS)
#: With two arrays of the optimizer, the model takes so many bytes.
WHOLE = 4 * 8 * 400_000


def search(profile=FOUR, batch=None, **wanted):
    return Choices(profile, Wanted(batch or SAMPLES * profile.ranks,
                                   **wanted))


def ways(found):
    return [one.configuration for one in found.candidates]


# --- the best of all ---------------------------------------------------------

@some
@given(jobs(most=4))
def test_what_is_left_out_is_no_better(profile):
    """The same search that simulates all it looks at."""
    found = search(profile)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Choices, '_is_too_slow', lambda *_: False)
        patched.setattr(PipelineModel, 'least_of_passes', lambda *_: 0.0)
        all_ = search(profile)
    assert all_.simulated >= found.simulated
    best = min(one.seconds for one in all_.candidates)
    assert found.best.seconds == pytest.approx(best, rel=1e-5)
    # Of each kind there is one that is about as good as the best.
    known = kinds(found.candidates)
    for kind, one in kinds(all_.candidates).items():
        if kind in known:
            assert known[kind].seconds <= one.seconds / (
                1 - choices._NEAR) * (1 + 1e-5)


@some
@given(jobs(most=4))
def test_the_best_is_no_slower_than_any_replicas(profile):
    found = search(profile)
    model = StepModel(profile, SAMPLES * profile.ranks)
    for codec in 'fp8', 'float16', 'float32':
        for algorithm in 'direct', 'ring':
            plain = Configuration(profile.ranks, codec=codec,
                                  algorithm=algorithm)
            assert found.best.seconds <= model.predict(
                plain).seconds.value * (1 + 1e-5)


def test_the_same_profile_gives_the_same_choice():
    first, second = (json.dumps([
        (one.configuration.as_dict(), one.seconds) for one in
        search().candidates]) for _ in range(2))
    assert first == second


def test_candidates_come_by_their_seconds():
    found = search()
    seconds = [one.seconds for one in found.candidates]
    assert seconds == sorted(seconds)
    assert found.best is found.candidates[0]
    assert found.looked_at >= len(found.candidates)
    assert found.looked_at >= found.simulated
    # Each predicted in the way of the model of steps.
    model = StepModel(FOUR, 32)
    for one in found.candidates:
        assert one.step == model.predict(one.configuration)


def test_every_factorisation_is_there():
    assert {(one.stages, one.replicas) for one in ways(search())} == {
        (1, 4), (2, 2), (4, 1)}


def test_a_slow_network_wants_few_bytes_and_a_fast_one_none():
    slow = job(MODEL, range(2), rate=1e6, codec=codecs(5e8, 1e-3))
    best = search(slow, stages=(1,)).best.configuration
    assert best.codec == 'fp8'
    assert best.overlap == 'next_forward'
    fast = job(MODEL, range(2), rate=1e12, codec={
        **codecs(1e8, 1e-3), 'float32': codecs(1e12)['float32']})
    assert search(fast, stages=(1,)).best.configuration.codec == 'float32'


def test_stages_on_a_fast_link_are_better_than_replicas_on_none():
    """Two million parameters, of which replicas send all, and 320 values."""
    model = figures(*[.01] * 8, parameters=4_000_000, size=320)
    assert search(job(model, range(2), rate=1e6)
                  ).best.configuration.stages == 2


# --- what a user asks for ----------------------------------------------------

@pytest.mark.parametrize('names', [
    ('float32',), ('fp8', 'float16'), ('float16',)])
def test_only_wanted_codecs_are_chosen(names):
    found = search(codecs=names)
    assert {one.codec for one in ways(found) if one.replicas > 1} == set(
        names)


@pytest.mark.parametrize('stages', [(1,), (2,), (4,), (1, 2)])
def test_only_wanted_stages_are_chosen(stages):
    assert {one.stages for one in ways(search(stages=stages))} == set(stages)


@pytest.mark.parametrize('batch', [1, 3, 4, 9])
def test_a_pipeline_has_a_sample_for_each_micro_batch(batch):
    found = search(batch=batch)
    for one in found.candidates:
        way = one.configuration
        if one.step:
            assert way.replicas * way.micro_batches <= batch
        else:
            assert 'sample' in one.reason


def test_too_few_samples_for_anything_are_an_error_that_says_so():
    with pytest.raises(DoesNotFit, match=(
            'a batch of 1 has no sample for each of 4 ranks.*1 samples of a '
            'pipeline make no 4 micro-batches')):
        assert search(batch=1).best


# --- memory ------------------------------------------------------------------

@some
@given(jobs(most=4), st.floats(1e4, 1e8))
def test_only_what_fits_is_chosen(profile, memory):
    found = search(profile, memory=memory)
    for one in found.candidates:
        if one.step:
            assert max(one.memory) <= memory
            assert one.memory == found.memory.bytes_of(
                one.configuration, SAMPLES * profile.ranks)
        else:
            assert one.reason
    if any(one.step for one in found.candidates):
        assert max(found.best.memory) <= memory
    else:
        with pytest.raises(DoesNotFit, match='no way to run this job fits'):
            assert found.best


def test_a_model_that_is_too_large_is_cut():
    """Links are so fast that stages only wait for each other."""
    fast = job(MODEL, (0, 0, 1, 1), overhead=1e6)
    assert search(fast, memory=1e9).best.configuration.stages == 1
    found = search(fast, memory=1e6 + WHOLE / 2 + 4e6)
    assert found.best.configuration.stages > 1
    replicas = [one for one in found.candidates
                if one.configuration.stages == 1]
    assert replicas
    for one in replicas:
        assert 'on the fullest rank' in one.reason
        assert 'too much' in one.reason


def test_what_does_not_fit_says_by_how_much():
    """Of each layout, for that which needs least."""
    with pytest.raises(DoesNotFit, match=(
            r'^no way to run this job fits: 2 stages x 2, 2 micro-batches, '
            r'float32 direct: no cut into 2 stages fits into 1.\d+ MB per '
            r'rank; .* beside 2.\d+ MB that the exchange of replicas takes; '
            r'4 stages x 1, 4 micro-batches: no cut into 4 stages fits into '
            r'4 MB per rank; the best needs 4.31 MB, 303 kB more; '
            r'4 replicas, float32 direct: needs 17.7 MB on the fullest rank, '
            r'13.7 MB too much$')):
        assert search(memory=4e6).best
    with pytest.raises(DoesNotFit, match='no byte is left for the model, bes'
                       r'ide 2.\d+ MB'):
        assert search(memory=2e6).best


@some
@given(jobs(most=4))
def test_more_memory_makes_nothing_slower(profile):
    """By no more than cuts differ that a simpler model takes for equal."""
    before = None
    for memory in 1e5, 1e6, 3e6, 1e7, 1e8, None:
        found = search(profile, memory=memory)
        if not any(one.step for one in found.candidates):
            assert before is None
            continue
        seconds = found.best.seconds
        if before is not None:
            assert seconds <= before * 1.05
        before = seconds


# --- cuts --------------------------------------------------------------------

@pytest.mark.parametrize('schedule', [
    'gpipe', '1f1b', 'interleaved', 'zero_bubble'])
@pytest.mark.parametrize('stages', [2, 3, 4, 8])
def test_more_micro_batches_keep_no_more_alive(schedule, stages):
    """So a cut can be searched for with few of them."""
    chunks = 2 if schedule == 'interleaved' else 1
    few = CutProblem(stages, choices._ENOUGH * stages, schedule, chunks)
    for multiple in choices._MULTIPLES:
        if multiple > choices._ENOUGH and schedule != 'gpipe':
            assert CutProblem(stages, multiple * stages, schedule,
                              chunks).live() == few.live()


def test_equal_layers_are_dealt_out_equally():
    found, seconds = search().cut(4, 1, 8, '1f1b')
    assert [position.place for position in found.cuts] == [2, 4, 6]
    assert (found.stages, found.micro_batches, found.schedule) == (
        4, 8, '1f1b')
    assert found.predicted.seconds == seconds
    assert seconds == search().model.pipelines.seconds_of_passes(
        Configuration(1, 4, 8, found))


def test_kinds_are_what_configurations_have_in_common():
    assert kinds_of(Configuration()) == ['1 x 1']
    assert kinds_of(Configuration(4, codec='fp8', overlap=True)) == [
        '1 x 4', 'fp8', 'direct', 'overlap=True']
    assert kinds_of(Configuration(1, 2, 4, cut())) == [
        '2 x 1', '1f1b', '4 micro-batches']
    found = search()
    for kind, one in kinds(found.candidates).items():
        assert one.seconds == min(
            other.seconds for other in found.candidates
            if kind in kinds_of(other.configuration))


def test_one_rank_has_one_way():
    found = search(dataclasses.replace(job(MODEL)))
    assert ways(found) == [Configuration(1, codec='float32')]
