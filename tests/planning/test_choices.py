"""All ways are looked at, and those that fit are ranked."""
import contextlib
import dataclasses

from chainer_fp8pipe.planning.choices import Choices, Wanted, algorithms
from chainer_fp8pipe.planning.cuts import DoesNotFit
from chainer_fp8pipe.planning.job_plan import Configuration, Timing
from chainer_fp8pipe.planning.partition_plan import Cut
from chainer_fp8pipe.planning.schedule_time import Link
from chainer_fp8pipe.planning.step import exchange_bytes, predict, rank_memory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planning.jobs import figures, job

MODEL = figures(*[0.01] * 8, parameters=4_000_000, kept=1000)
#: An exchange of the model over a slow and over a fast link takes 0.8 s, 8 ms.
SLOW, FAST = 1e-7, 1e-9


def best(profile, **wanted):
    return Choices(profile, Wanted(64, **wanted)).candidates[0].way


@pytest.mark.parametrize(('profile', 'expected'), [
    (job(MODEL, 4, element=0.0), {'stages': 1, 'overlap': False}),
    (job(MODEL, 4, element=SLOW), {'stages': 4}),
    (job(MODEL, 4, element=SLOW, link=Link(1.0, 1e3)), {'stages': 1}),
    (job(MODEL, 2, element={'float32': SLOW, 'float16': SLOW / 2,
                            'fp8': SLOW / 4}, link=Link(1.0, 1e3)),
     {'codec': 'fp8'}),
    (job(MODEL, 1), {'replicas': 1})])
def test_the_first_way_is_the_one_that_suits(profile, expected):
    way = best(profile)
    assert {name: getattr(way, name) for name in expected} == expected


@pytest.mark.parametrize(('replicas', 'expected'), [
    (1, ('direct',)), (2, ('direct',)), (3, ('direct', 'ring')),
    (4, ('direct', 'ring', 'torus2d'))])
def test_algorithms_that_do_the_same_are_looked_at_once(replicas, expected):
    assert algorithms(replicas) == expected


def test_users_may_choose_stages_and_codecs():
    profile = job(MODEL, 4, (1, 2), element=FAST)
    found = Choices(profile, Wanted(64, codecs=('fp8',), stages=(2,)))
    assert {(one.way.stages, one.way.replicas, one.way.codec)
            for one in found.candidates} == {(2, 2, 'fp8')}


@pytest.mark.parametrize('batch', [1, 2, 3, 5, 8])
def test_a_small_batch_leaves_what_it_can_fill(batch):
    """Fewer micro-batches than stages, if need be."""
    found = Choices(job(MODEL, 4, (1, 2)), Wanted(batch)).candidates
    assert all(one.way.replicas * one.way.micro_batches <= batch
               for one in found)
    assert any(one.way.stages == 4 for one in found)
    assert any(one.way.stages == 1 for one in found) == (batch >= 4)


@pytest.mark.parametrize(('ranks', 'model'), [
    (2, MODEL), (3, MODEL), (5, MODEL), (13, figures(.01, parameters=4)),
    (2, dataclasses.replace(MODEL, parameters={}, order=(),
                            calls=MODEL.calls[:1],
                            calls_few=MODEL.calls_few[:1]))])
def test_primes_and_models_without_parameters(ranks, model):
    if not model.parameters:
        model = dataclasses.replace(model, **{
            name: tuple(dataclasses.replace(call, parameters=())
                        for call in getattr(model, name))
            for name in ('calls', 'calls_few')})
    choices = Choices(job(model, ranks, element=FAST), Wanted(4 * ranks))
    text = str(choices.plan(choices.candidates[0].way))
    assert 'is predicted to take' in text


def test_promising_ways_are_of_different_kinds_and_the_plain_one_is_there():
    profile = job(MODEL, 4, (1, 2), element={
        'float32': SLOW, 'float16': SLOW / 2, 'fp8': SLOW / 4})
    choices = Choices(profile, Wanted(64))
    *found, naive = choices.promising()
    assert naive == Configuration(4, codec='naive')
    assert len(found) in (5, 6)
    assert len({(way.stages, way.codec, way.overlap) for way in found}
               ) == len(found)
    assert any(way.stages == 1 and way.codec == 'float32'
               and not way.overlap for way in found)
    assert found[0] == choices.candidates[0].way


@pytest.mark.parametrize(('slowdown', 'slow'), [
    ((1.0, 1.1), []), ((1.0, 2.0), [1]), ((2.0, 1.0), [0]),
    ((3.0, 3.0), []), ((1.0, 1.2, 3.0, .9), [2])])
def test_only_ranks_that_are_much_slower_are_named(slowdown, slow):
    choices = Choices(job(MODEL, len(slowdown), slowdown=slowdown,
                          element=FAST), Wanted(16))
    remarks = choices.plan(choices.candidates[0].way).remarks
    assert [int(one.split()[1]) for one in remarks] == slow


def test_the_seconds_of_a_plan_are_those_of_its_trial():
    choices = Choices(job(MODEL, 2, element=FAST), Wanted(16))
    way = choices.candidates[0].way
    trials = [Timing('2 replicas, naive', 2.0, .5), Timing(str(way), 1.0, .1)]
    plan = choices.plan(way, trials, ['said'])
    assert (plan.seconds, plan.spread, plan.is_tried) == (1.0, .1, True)
    assert sum(plan.parts.values()) == pytest.approx(1.0)
    assert [one.seconds for one in plan.trials] == [1.0, 2.0]
    text = str(plan)
    for said in ('takes 1000 ms +- 10 %, measured here', '<- this plan',
                 'note: said', 'not tried'):
        assert said in text
    assert str(way) not in [one.way for one in plan.alternatives]
    naive = Configuration(2, codec='naive')     # of which nothing is predicted
    assert choices.plan(naive, trials).seconds == 2.0


# --- memory -----------------------------------------------------------------

@settings(max_examples=20, deadline=None,
          suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([2, 4]), st.sampled_from([16, 64]),
       st.integers(0, 3_000_000), st.floats(.05, 1.5), st.integers(0, 2))
def test_no_way_takes_more_than_the_limit(ranks, batch, kept, share, arrays):
    model = figures(*[.01] * 6, parameters=4_000_000, kept=kept,
                    optimizer_arrays=arrays)
    profile = job(model, ranks, (1, 2), element=FAST)
    free = Choices(profile, Wanted(batch)).candidates
    limit = share * max(max(one.memory) for one in free)
    if all(max(one.memory) > limit for one in free):
        with contextlib.suppress(DoesNotFit):       # or it recomputes
            Choices(profile, Wanted(batch, limit))
        return
    found = Choices(profile, Wanted(batch, limit))
    for one in found.candidates:
        assert max(one.memory) <= limit
        assert rank_memory(profile, batch, one.way) == one.memory


def test_what_does_not_fit_says_by_how_much():
    with pytest.raises(DoesNotFit, match=r'2 replicas: needs .* too much; '
                       r'2 stages: no cut into 2 stages fits into 1 kB'):
        Choices(job(MODEL, 2, element=FAST), Wanted(16, 1000.0))


def test_layouts_that_do_not_fit_are_in_the_plan():
    model = figures(*[.01] * 4, parameters=40_000_000)
    profile = job(model, 2, element=FAST)
    limit = max(next(one for one in Choices(profile, Wanted(16)).candidates
                     if one.way.stages == 2).memory) * 1.05
    choices = Choices(profile, Wanted(16, limit))
    plan = choices.plan(choices.candidates[0].way)
    assert plan.choice.stages == 2
    assert [(one.way, one.seconds) for one in plan.alternatives
            if one.reason] == [('2 replicas', 0)]
    assert 'too much' in str(plan)


@pytest.mark.parametrize(('codec', 'overlap', 'least'), [
    ('float32', False, 0), ('float32', True, 4e6), ('fp8', False, 4e6),
    ('fp8', True, 5e6), ('float16', True, 2e6), ('naive', False, 8e6)])
def test_what_an_exchange_of_a_million_elements_keeps(codec, overlap, least):
    found = [exchange_bytes(Configuration(
        replicas, codec=codec, overlap=overlap), 1e6)
        for replicas in (1, 2, 8)]
    assert found[0] == 0
    assert all(least <= one <= least + 1e7 for one in found[1:])


# --- cuts -------------------------------------------------------------------

def test_the_wire_is_that_of_the_layout():
    """Pipelines inside of hosts do not mind a narrow wire between hosts."""
    model = figures(*[.01] * 8, size=8 * 200_000, parameters=4000)

    def narrow(calls):
        return tuple(dataclasses.replace(call, outputs={
            key: value._replace(shape=(8,))
            for key, value in call.outputs.items()}) if number == 1 else call
            for number, call in enumerate(calls))
    model = dataclasses.replace(model, calls=narrow(model.calls),
                                calls_few=narrow(model.calls_few))
    fast, slow = Link(1e-6, 1e10), Link(1e-4, 2e7)
    cuts = [Choices(job(model, 4, (1, 2), links={2: link, 4: slow}),
                    Wanted(64, stages=(2,))).cut(2, 2, 4, '1f1b').positions[0]
            for link in (fast, slow)]
    assert [cut.place for cut in cuts] == [4, 2]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=4, max_size=7),
       st.integers(0, 100_000))
def test_the_cut_is_as_good_as_any(milliseconds, size):
    model = figures(*(one * 1e-2 for one in milliseconds),
                    size=8 * 4 * (size + 1), parameters=400)
    profile = job(model, 2, link=Link(1e-4, 1e8))
    choices = Choices(profile, Wanted(16, stages=(2,)))
    found = choices.cut(2, 1, 4, '1f1b')

    def seconds(cut):
        return sum(predict(profile, 16, Configuration(
            1, 2, 4, cut)).values())
    every = [seconds(dataclasses.replace(found, cuts=(
        Cut(group[0]),))) for group in found.order[1:]]
    assert seconds(found) <= min(every) * 1.1
