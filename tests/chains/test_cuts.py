"""The search for a cut, against trying all of them."""
import dataclasses
import itertools
import re

from chainer_fp8pipe.chains.calls import order_of
from chainer_fp8pipe.chains.cuts import (
    CutProblem,
    DoesNotFit,
    Intervals,
    Wire,
    least_memory,
    plan_of,
    search,
)
from chainer_fp8pipe.report.quantities import parse_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains.traces import PARAMETERS, chain, few, traces

WIRE = Wire(1e-4, 1e6)


def intervals_of(calls, parameters=PARAMETERS):
    return Intervals(calls, order_of(calls), parameters)


def every_cut(intervals, problem):
    for ends in itertools.combinations(range(1, intervals.count),
                                       problem.stages * problem.chunks - 1):
        yield (*ends, intervals.count)


def slowest(intervals, problem, ends):
    """Seconds of the slowest chunk, with what it sends and receives."""
    def traffic(index):
        return (intervals.crossing[index] / problem.wire.bandwidth
                + (intervals.crossing[index] > 0) * problem.wire.latency)
    return max(
        (intervals.forward[end] - intervals.forward[start])
        * (1 + (problem.recompute is True and not intervals.once[start, end]))
        + intervals.backward[end] - intervals.backward[start]
        + 2 * (traffic(start) + traffic(end))
        for start, end in itertools.pairwise((0, *ends)))


@st.composite
def problems(draw):
    """Intervals, and what a cut of them is searched for."""
    calls = draw(traces(seconds=True, most=10))
    for call in calls:
        call.once = draw(st.integers(0, 5)) == 0
    intervals = intervals_of(calls)
    stages = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(['gpipe', '1f1b', 'zero_bubble']))
    return intervals, CutProblem(
        stages, draw(st.integers(1, 4)), schedule, wire=WIRE,
        recompute=draw(st.sampled_from(['auto', True, False])))


@few
@given(problems(), st.floats(100, 200_000))
def test_a_cut_is_near_the_fastest_and_keeps_a_limit_of_memory(given, memory):
    """By a tenth at most: another may have the shorter step."""
    intervals, problem = given
    chunks = problem.stages * problem.chunks
    if intervals.count < chunks:
        with pytest.raises(ValueError, match=f'into {intervals.count} parts at'
                           f' most, but {chunks} are asked for'):
            search(intervals, problem)
        return
    found = search(intervals, problem)
    found_ends = intervals.ends_of(found.positions)
    fastest = min(slowest(intervals, problem, ends)
                  for ends in every_cut(intervals, problem))
    assert slowest(intervals, problem, found_ends) <= 1.1 * fastest + 1e-9
    assert found == plan_of(intervals, problem, found_ends)
    assert found.recompute == tuple(
        problem.recompute is True and not intervals.once[start, end]
        for start, end in itertools.pairwise((0, *found_ends)))
    problem = dataclasses.replace(problem, memory=memory)
    if any(max(plan_of(intervals, problem, ends).predicted.memory) <= memory
           for ends in every_cut(intervals, problem)):
        assert max(search(intervals, problem).predicted.memory) <= memory
    else:
        with pytest.raises(DoesNotFit):
            search(intervals, problem)


def places(plan):
    """Of a chain's calls, those before which a plan cuts."""
    return [cut.place for cut in plan.positions]


def large(number, **options):
    """Four calls, one of which has a parameter of 400 kB."""
    calls, parameters = chain(*[.01] * 4, **options)
    parameters[f'/{number}/W'] = parameters[f'/{number}/W']._replace(
        shape=(100_000,))
    return calls, parameters


def narrow():
    """Long calls around two short ones, between which little crosses."""
    calls, parameters = chain(.02, .0001, .0001, .02, size=4_000_000)
    calls[1].outputs = {0: calls[1].outputs[0]._replace(shape=(10,))}
    return calls, parameters


@pytest.mark.parametrize(('model', 'problem', 'expected', 'busy'), [
    (chain(*[.01] * 12), CutProblem(4, 8), [3, 6, 9], [.03] * 4),
    # Of equal cuts the one that moves less.
    (narrow(), CutProblem(2, 4), [2], [.0201] * 2),
    # A large parameter gets a rank of its own.
    (large(3), CutProblem(2, 4, memory=2_005_500), [3], [.03, .01]),
    (chain(*[.01] * 8, kept=2000), CutProblem(2, 4, 'interleaved', 2),
     [2, 4, 6], [.02] * 4),
    # Chunks of a rank share its memory.
    (chain(*[.01] * 8, kept=2000), CutProblem(
        2, 4, 'interleaved', 2, memory=70_000), [2, 4, 6], [.02] * 4),
    # Only the stages that would not fit run forward twice.
    (chain(*[.01] * 4, kept=10_000_000), CutProblem(4, 8, memory=25e6),
     [1, 2, 3], [.015, .015, .01, .01])])
def test_cuts_of_chains(model, problem, expected, busy):
    found = search(intervals_of(*model), problem)
    assert places(found) == expected
    assert found.predicted.busy == pytest.approx(busy)
    assert found.recompute == tuple(
        seconds in (.015,) for seconds in busy)
    assert len(found.predicted.memory) == problem.stages
    assert not problem.memory or max(found.predicted.memory) <= problem.memory


def test_weights_that_wait_take_memory():
    """As many gradients of outputs as micro-batches are live."""
    calls, parameters = chain(*[.02] * 2, size=1000)
    plain = intervals_of(calls, parameters)
    calls, _ = chain(*[.02] * 2, size=1000)
    for call in calls:
        call.deferrable = True
    waiting = intervals_of(calls, parameters)
    for schedule, waits in ('1f1b', False), ('zero_bubble', True):
        problem = CutProblem(2, 4, schedule)
        less, more = (plan_of(one, problem, (1, 2)).predicted.memory
                      for one in (plain, waiting))
        assert more == tuple(
            nbytes + waits * live * calls[0].outputs[0].nbytes
            for nbytes, live in zip(less, problem.live(), strict=True))


def test_a_step_is_the_slowest_ranks_work_and_the_others_bubble():
    predicted = plan_of(intervals_of(*chain(.02, .03, size=0)), CutProblem(
        2, 4, wire=Wire(.001, 1e12)), (1, 2)).predicted
    assert predicted.seconds == pytest.approx(4 * .03 + .02 + 2 * .001)


def test_memory_of_a_stage_is_that_of_its_parts():
    """Five arrays of its parameters; two micro-batches live."""
    calls, parameters = chain(.01, .01, size=1000, parameters=400, kept=7000)
    calls[1].temporary = 50
    edges = 2 * 1000            # a buffer to send from, one to receive into
    # Inputs of all, and what one of them keeps.
    for recompute, lives in (False, 2), (True, 1):
        problem = CutProblem(2, 4, copies=5, overhead=3, recompute=recompute)
        found = plan_of(intervals_of(calls, parameters), problem, (1, 2))
        assert found.predicted.memory == (
            3 + 5 * 400 + lives * 7000 + edges,
            3 + 5 * 400 + 50 + 1 * (7000 + 1000) + edges)


def test_the_update_of_the_largest_parameter_has_room():
    """By which activations, which are gone then, are exceeded."""
    calls, parameters = chain(.01, .01, size=1000, parameters=4000)
    intervals = intervals_of(calls, parameters)
    problem = CutProblem(2, 4, copies=4, temporary=3)
    assert plan_of(intervals, problem, (1, 2)).predicted.memory == (
        (4 + 3) * 4000, (4 + 3) * 4000)
    kept, _ = chain(.01, .01, size=1000, parameters=4000, kept=50_000)
    assert plan_of(intervals_of(kept, parameters), problem, (1, 2)
                   ).predicted.memory == plan_of(
        intervals_of(kept, parameters), dataclasses.replace(
            problem, temporary=0), (1, 2)).predicted.memory
    with pytest.raises(DoesNotFit, match='needs 28 kB'):
        search(intervals, dataclasses.replace(problem, memory=27_000))


def test_a_model_that_does_not_fit_says_by_how_much():
    intervals = intervals_of(*chain(*[.01] * 8, parameters=40_000_000))
    problem = CutProblem(2, 4, memory=500e6)
    with pytest.raises(DoesNotFit) as caught:
        search(intervals, problem)
    said = str(caught.value)
    needed, more = map(float, re.search(
        r'needs (\d+) MB, (\d+) MB more', said).groups())
    # Four layers of 40 MB in five copies.
    assert needed == pytest.approx(800, rel=.02)
    assert more == pytest.approx(needed - 500, abs=1)
    assert 'into 2 stages fits into 500 MB per rank' in said
    assert search(intervals, dataclasses.replace(
        problem, memory=least_memory(intervals, problem)))


@pytest.mark.parametrize(('model', 'problem', 'said'), [
    (chain(*[.01] * 2, kept=50_000_000, parameters=4),
     CutProblem(2, 4, memory=60e6, recompute=False),
     r"help: more ranks, smaller micro-batches, recompute='auto'$"),
    (chain(*[.01] * 4, parameters=300), CutProblem(2, 4, memory=1000),
     r'fits into 1 kB per rank; the best needs (\S+ kB), \S+ kB more'),
    (chain(.01, .01), CutProblem(2, 4, memory=1e6, overhead=16e6),
     'A rank takes 16 MB for code and buffers, .* raise the limit')])
def test_what_would_help_is_said(model, problem, said):
    intervals = intervals_of(*model)
    with pytest.raises(DoesNotFit, match=said) as caught:
        search(intervals, problem)
    if needed := re.search(r'needs (\S+ kB)', str(caught.value)):
        # Who takes the need for the limit gets a cut.
        assert search(intervals, dataclasses.replace(
            problem, memory=parse_bytes(needed[1])))


def test_a_stage_that_must_not_run_twice_keeps_all():
    calls, parameters = chain(*[.01] * 2, kept=5000, size=100)
    calls[0].once = True
    intervals = intervals_of(calls, parameters)
    problem = CutProblem(2, 4, recompute=True)
    found = search(intervals, problem)
    assert found.recompute == (False, True)
    # The first has two micro-batches alive, of its inputs and what it keeps.
    plain = search(intervals, dataclasses.replace(problem, recompute=False))
    assert found.predicted.memory[0] == plain.predicted.memory[0]
    assert found.predicted.busy[0] == plain.predicted.busy[0]
    limit = dataclasses.replace(problem, recompute='auto',
                                memory=plain.predicted.memory[0] - 1)
    with pytest.raises(DoesNotFit):
        search(intervals, limit)
    calls[0].once = False
    assert search(intervals_of(calls, parameters), limit
                  ).recompute == (True, False)
