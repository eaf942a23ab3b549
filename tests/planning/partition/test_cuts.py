"""The search for a cut, against trying all of them."""
import dataclasses
import itertools
import re

from chainer_fp8pipe.planning.partition.cuts import (
    CutProblem,
    DoesNotFit,
    Wire,
    best_cut,
    evaluate,
    least_memory,
)
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import order_of
from chainer_fp8pipe.planning.sizes import parse_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.traces import PARAMETERS, chain, few, traces

WIRE = Wire(1e-4, 1e6)


def intervals_of(calls, parameters=PARAMETERS):
    return Intervals(calls, order_of(calls), parameters)


def every_cut(intervals, task):
    for ends in itertools.combinations(range(1, intervals.count),
                                       task.parts - 1):
        yield (*ends, intervals.count)


def slowest(intervals, task, ends):
    """Seconds of the slowest chunk, with what it sends and receives."""
    def traffic(index):
        return (intervals.crossing[index] / task.wire.bandwidth
                + (intervals.values[index] > 0) * task.wire.latency)
    return max(
        (intervals.forward[end] - intervals.forward[start])
        * (1 + (task.recompute is True and not intervals.once[start, end]))
        + intervals.backward[end] - intervals.backward[start]
        + 2 * (traffic(start) + traffic(end))
        for start, end in itertools.pairwise((0, *ends)))


@st.composite
def tasks(draw):
    """Intervals, and what a cut of them is searched for."""
    calls = draw(traces(seconds=True, most=10))
    for call in calls:
        call.once = draw(st.integers(0, 5)) == 0
    intervals = intervals_of(calls)
    stages = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(['gpipe', '1f1b', 'zero_bubble']))
    return intervals, CutProblem(stages, draw(st.integers(1, 4)), schedule,
                           recompute=draw(st.sampled_from(
                               ['auto', True, False])), wire=WIRE)


@few
@given(tasks())
def test_no_cut_has_a_much_faster_slowest_stage(given):
    """By a tenth at most: another may have the shorter step."""
    intervals, task = given
    if intervals.count < task.parts:
        with pytest.raises(ValueError, match=f'into {intervals.count} parts '
                           f'at most, but {task.parts} are asked for'):
            best_cut(intervals, task)
        return
    found = best_cut(intervals, task)
    fastest = min(slowest(intervals, task, ends)
                  for ends in every_cut(intervals, task))
    assert slowest(intervals, task, found.ends) <= 1.1 * fastest + 1e-9
    assert found == evaluate(intervals, task, found.ends)
    assert found.recompute == tuple(
        task.recompute is True and not intervals.once[start, end]
        for start, end in itertools.pairwise((0, *found.ends)))


def check_what_fits(intervals, task):
    """The best cut keeps the limit of memory, if any cut does."""
    if any(max(evaluate(intervals, task, ends).predicted.memory)
           <= task.memory for ends in every_cut(intervals, task)):
        best = best_cut(intervals, task)
        assert max(best.predicted.memory) <= task.memory
    else:
        with pytest.raises(DoesNotFit):
            best_cut(intervals, task)


@few
@given(tasks(), st.floats(100, 200_000))
def test_a_limit_of_memory_holds_or_nothing_fits(given, memory):
    intervals, task = given
    task = dataclasses.replace(task, memory=memory)
    if intervals.count < task.parts:
        return
    check_what_fits(intervals, task)


def test_equal_calls_are_dealt_out_equally():
    calls, parameters = chain(*[.01] * 12)
    found = best_cut(intervals_of(calls, parameters), CutProblem(4, 8))
    assert found.ends == (3, 6, 9, 12)
    assert found.predicted.busy == pytest.approx((.03,) * 4)


def test_of_equal_cuts_the_one_that_moves_less_is_taken():
    calls, parameters = chain(.02, .0001, .0001, .02, size=4_000_000)
    calls[1].outputs = {0: calls[1].outputs[0]._replace(shape=(10,))}
    found = best_cut(intervals_of(calls, parameters), CutProblem(2, 4))
    assert found.ends == (2, 4)
    assert found.predicted.crossing == (40.0,)


def halves(calls):
    """A half of each backward pass is for gradients of weights."""
    for call in calls:
        call.deferrable = .5
    return calls


def test_weights_that_wait_fill_the_bubble():
    """A forward and a backward pass are 10 ms each, on two ranks."""
    calls, parameters = chain(*[.02] * 2)
    intervals = intervals_of(halves(calls), parameters)
    plain, split = (evaluate(intervals, CutProblem(2, 4, schedule, wire=Wire(
        0, 1e12)), (1, 2)).predicted for schedule in ('1f1b', 'zero_bubble'))
    assert plain.busy == split.busy
    assert plain.seconds == pytest.approx((4 + 1) * .02)
    # The last rank's gradient comes without the weights', and the first
    # computes its own meanwhile: a bubble of one forward pass and half a
    # backward pass less that.
    assert split.seconds == pytest.approx(4 * .02 + .01)


def test_gradients_that_wait_for_weights_take_memory():
    calls, parameters = chain(*[.02] * 2, size=1000)
    plain = intervals_of(calls, parameters)
    waiting = intervals_of(halves(chain(*[.02] * 2, size=1000)[0]),
                           parameters)
    task = CutProblem(2, 4, 'zero_bubble')
    outputs = calls[0].outputs[0].nbytes
    for live, less, more in zip(
            task.live(), evaluate(plain, task, (1, 2)).predicted.memory,
            evaluate(waiting, task, (1, 2)).predicted.memory, strict=True):
        assert more == pytest.approx(less + live * outputs)
    task = dataclasses.replace(task, schedule='1f1b')
    assert (evaluate(plain, task, (1, 2)).predicted.memory
            == evaluate(waiting, task, (1, 2)).predicted.memory)


def test_a_step_takes_as_long_as_the_simple_pipeline_formula():
    """(micro-batches + stages - 1) times the time of a stage."""
    calls, parameters = chain(*[.01] * 4)
    task = CutProblem(4, 6, 'gpipe', wire=Wire(0, 1e15))
    found = best_cut(intervals_of(calls, parameters), task)
    assert found.predicted.seconds == pytest.approx((6 + 4 - 1) * .01)


def test_memory_of_a_stage_is_that_of_its_parts():
    """Five arrays of its parameters; two micro-batches live."""
    calls, parameters = chain(.01, .01, size=1000, parameters=400, kept=7000)
    calls[1].temporary = 50
    task = CutProblem(2, 4, '1f1b', copies=5, overhead=3)
    found = evaluate(intervals_of(calls, parameters), task, (1, 2))
    edges = 2 * 1000            # a buffer to send from, one to receive into
    assert found.predicted.memory == (
        3 + 5 * 400 + 2 * 7000 + edges,
        3 + 5 * 400 + 50 + 1 * (7000 + 1000) + edges)
    # Inputs of all, and what one of them keeps.
    again = evaluate(intervals_of(calls, parameters), dataclasses.replace(
        task, recompute=True), (1, 2))
    assert again.predicted.memory == (
        3 + 5 * 400 + 7000 + edges,
        3 + 5 * 400 + 50 + 1000 + 7000 + edges)


def test_only_the_stages_that_would_not_fit_run_forward_twice():
    calls, parameters = chain(*[.01] * 4, kept=10_000_000)
    task = CutProblem(4, 8, '1f1b', memory=25e6)
    found = best_cut(intervals_of(calls, parameters), task)
    assert found.recompute == (True, True, False, False)
    assert found.predicted.busy == pytest.approx((.015, .015, .01, .01))
    assert max(found.predicted.memory) <= 25e6
    with pytest.raises(DoesNotFit, match=r"recompute='auto' \("):
        best_cut(intervals_of(calls, parameters), dataclasses.replace(
            task, recompute=False))


def test_a_large_parameter_gets_a_rank_of_its_own():
    calls, parameters = chain(.01, .01, .01, .01)
    parameters['/3/W'] = parameters['/3/W']._replace(shape=(100_000,))
    found = best_cut(intervals_of(calls, parameters), CutProblem(
        2, 4, memory=2_005_500))
    assert found.ends == (3, 4)


def test_a_model_that_does_not_fit_says_by_how_much():
    calls, parameters = chain(*[.01] * 8, parameters=40_000_000)
    intervals = intervals_of(calls, parameters)
    task = CutProblem(2, 4, memory=500e6)
    with pytest.raises(DoesNotFit) as caught:
        best_cut(intervals, task)
    said = str(caught.value)
    needed, more = map(float, re.search(
        r'needs (\d+) MB, (\d+) MB more', said).groups())
    # Four layers of 40 MB in five copies.
    assert needed == pytest.approx(800, rel=.02)
    assert more == pytest.approx(needed - 500, abs=1)
    assert 'into 2 stages fits into 500 MB per rank' in said
    assert re.search(r'4 ranks \(40\d MB\); 8 ranks \(20\d MB\)', said)
    assert best_cut(intervals, dataclasses.replace(
        task, memory=least_memory(intervals, task)))


def test_small_limits_and_needs_are_said_in_units_that_fit():
    calls, parameters = chain(*[.01] * 4, parameters=300)
    intervals = intervals_of(calls, parameters)
    task = CutProblem(2, 4, memory=1000)
    with pytest.raises(DoesNotFit) as caught:
        best_cut(intervals, task)
    said = re.search(r'fits into 1 kB per rank; the best needs (\S+ kB), '
                     r'\S+ kB more', str(caught.value))
    # Who takes the need for the limit gets a cut.
    assert best_cut(intervals, dataclasses.replace(
        task, memory=parse_bytes(said[1])))


def test_a_stage_that_must_not_run_twice_keeps_all():
    calls, parameters = chain(*[.01] * 2, kept=5000, size=100)
    calls[0].once = True
    intervals = intervals_of(calls, parameters)
    task = CutProblem(2, 4, recompute=True)
    found = best_cut(intervals, task)
    assert found.recompute == (False, True)
    # The first has two micro-batches alive, of its inputs and what it keeps.
    plain = best_cut(intervals, dataclasses.replace(task, recompute=False))
    assert found.predicted.memory[0] == plain.predicted.memory[0]
    assert found.predicted.busy[0] == plain.predicted.busy[0]
    limit = dataclasses.replace(task, recompute='auto',
                                memory=plain.predicted.memory[0] - 1)
    with pytest.raises(DoesNotFit):
        best_cut(intervals, limit)
    calls[0].once = False
    assert best_cut(intervals_of(calls, parameters), limit
                    ).recompute == (True, False)


def test_what_recomputation_would_save_is_said():
    calls, parameters = chain(*[.01] * 2, kept=50_000_000, parameters=4)
    with pytest.raises(DoesNotFit, match=r"help: recompute='auto' \(50.1 MB\);"
                       r' smaller micro-batches$'):
        best_cut(intervals_of(calls, parameters), CutProblem(
            2, 4, memory=60e6, recompute=False))


@pytest.mark.parametrize(('schedule', 'live'), [
    ('gpipe', [4, 4, 4]), ('1f1b', [3, 2, 1])])
def test_a_schedule_says_how_many_micro_batches_live(schedule, live):
    assert CutProblem(3, 4, schedule).live() == live


@pytest.mark.parametrize('memory', [None, 70_000, 50_000])
def test_a_rank_with_two_chunks_shares_its_memory(memory):
    calls, parameters = chain(*[.01] * 8, kept=2000)
    found = best_cut(intervals_of(calls, parameters), CutProblem(
        2, 4, 'interleaved', chunks=2, memory=memory))
    assert memory or found.ends == (2, 4, 6, 8)
    assert len(found.predicted.memory) == 2
    assert memory is None or max(found.predicted.memory) <= memory
    assert any(found.recompute) == (memory == 50_000)


@pytest.mark.parametrize('recompute', ['auto', True, False])
def test_there_is_a_cut_just_where_one_fits(recompute):
    """Limits of memory around what each cut of a model needs."""
    calls, parameters = chain(*[.01, .03, .02, .01, .02], kept=20_000,
                              size=8000)
    intervals = intervals_of(calls, parameters)
    task = CutProblem(3, 4, 'gpipe', recompute=recompute)
    for memory in range(40_000, 300_000, 4000):
        limited = dataclasses.replace(task, memory=memory)
        check_what_fits(intervals, limited)
