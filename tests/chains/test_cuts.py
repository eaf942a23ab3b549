"""Costs of chunks and the search for a cut, against trying all of them."""
import bisect
import collections
import dataclasses
import itertools
import re

from chainer_fp8pipe.chains.calls import (
    Position,
    Source,
    order_of,
    positions,
)
from chainer_fp8pipe.chains.cuts import (
    BANDWIDTH,
    LATENCY,
    CutProblem,
    DoesNotFit,
    Intervals,
    plan_of,
    search,
)
from chainer_fp8pipe.chains.layout import Layout
from chainer_fp8pipe.chains.measure import optimizer_arrays
from chainer_fp8pipe.report.quantities import parse_bytes

import chainer
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains.traces import (
    PARAMETERS,
    chain,
    few,
    program_of,
    stacked,
    traces,
)


def intervals_of(calls, parameters=PARAMETERS, cuts=None):
    return Intervals(calls, order_of(calls), parameters, cuts)


def ends_of(intervals, plan):
    """Index after the last atom of each chunk."""
    return (*map(intervals.starts.index, plan.cuts), intervals.count)


def every_cut(intervals, problem):
    for ends in itertools.combinations(range(1, intervals.count),
                                       problem.stages * problem.chunks - 1):
        yield (*ends, intervals.count)


def slowest(intervals, problem, ends):
    """Seconds of the slowest chunk, with what it sends and receives."""
    def traffic(index):
        return (intervals.crossing[index] / BANDWIDTH
                + (intervals.crossing[index] > 0) * LATENCY)
    return max(
        intervals.forward[start, end]
        * (1 + (problem.recompute is True))
        + intervals.backward[start, end]
        + 2 * (traffic(start) + traffic(end))
        for start, end in itertools.pairwise((0, *ends)))


@st.composite
def problems(draw):
    """Intervals, and what a cut of them is searched for."""
    calls = draw(traces(seconds=True, most=10))
    intervals = intervals_of(calls)
    stages = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(['gpipe', '1f1b', 'zero_bubble']))
    return intervals, CutProblem(
        stages, draw(st.integers(1, 4)), schedule,
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
    found_ends = ends_of(intervals, found)
    fastest = min(slowest(intervals, problem, ends)
                  for ends in every_cut(intervals, problem))
    assert slowest(intervals, problem, found_ends) <= 1.1 * fastest + 1e-9
    assert found == plan_of(intervals, problem, found_ends)
    assert found.recompute == (problem.recompute is True,) * chunks
    problem = dataclasses.replace(problem, memory=memory)
    if any(max(plan_of(intervals, problem, ends).memory) <= memory
           for ends in every_cut(intervals, problem)):
        assert max(search(intervals, problem).memory) <= memory
    else:
        with pytest.raises(DoesNotFit):
            search(intervals, problem)


def places(plan):
    """Of a chain's calls, those before which a plan cuts."""
    return [place for place, _ in plan.cuts]


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
    assert found.seconds == pytest.approx(busy)
    assert found.recompute == tuple(
        seconds in (.015,) for seconds in busy)
    assert len(found.memory) == problem.stages
    assert not problem.memory or max(found.memory) <= problem.memory


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
        less, more = (plan_of(one, problem, (1, 2)).memory
                      for one in (plain, waiting))
        assert more == tuple(
            nbytes + waits * live * calls[0].outputs[0].nbytes
            for nbytes, live in zip(less, problem.live, strict=True))


def test_memory_of_a_stage_is_that_of_its_parts():
    """Five arrays of its parameters; two micro-batches live."""
    calls, parameters = chain(.01, .01, size=1000, parameters=400, kept=7000)
    calls[1].temporary = 50
    edges = 2 * 1000            # a buffer to send from, one to receive into
    # Inputs of all, and what one of them keeps.
    for recompute, lives in (False, 2), (True, 1):
        problem = CutProblem(2, 4, copies=5, overhead=3, recompute=recompute)
        found = plan_of(intervals_of(calls, parameters), problem, (1, 2))
        assert found.memory == (
            3 + 5 * 400 + lives * 7000 + edges,
            3 + 5 * 400 + 50 + 1 * (7000 + 1000) + edges)


def test_the_update_of_the_largest_parameter_has_room():
    """By which activations, which are gone then, are exceeded."""
    calls, parameters = chain(.01, .01, size=1000, parameters=4000)
    intervals = intervals_of(calls, parameters)
    problem = CutProblem(2, 4, copies=4, temporary=3)
    assert plan_of(intervals, problem, (1, 2)).memory == (
        (4 + 3) * 4000, (4 + 3) * 4000)
    kept, _ = chain(.01, .01, size=1000, parameters=4000, kept=50_000)
    assert plan_of(intervals_of(kept, parameters), problem, (1, 2)
                   ).memory == plan_of(
        intervals_of(kept, parameters), dataclasses.replace(
            problem, temporary=0), (1, 2)).memory
    with pytest.raises(DoesNotFit, match='needs 28 kB'):
        search(intervals, dataclasses.replace(problem, memory=27_000))


@pytest.mark.parametrize(('model', 'problem', 'said'), [
    (chain(*[.01] * 2, kept=50_000_000, parameters=4),
     CutProblem(2, 4, memory=60e6, recompute=False),
     r"help: more ranks, smaller micro-batches, recompute='auto'$"),
    (chain(*[.01] * 4, parameters=300), CutProblem(2, 4, memory=1000),
     r'2 stages fits into 1 kB per rank; the best needs (\S+ kB), of which'),
    (chain(.01, .01), CutProblem(2, 4, memory=1e6, overhead=16e6),
     'of which 16 MB are for code and buffers')])
def test_what_would_help_is_said(model, problem, said):
    intervals = intervals_of(*model)
    with pytest.raises(DoesNotFit, match=said) as caught:
        search(intervals, problem)
    if needed := re.search(r'needs (\S+ kB)', str(caught.value)):
        # Who takes the need for the limit gets a cut.
        assert search(intervals, dataclasses.replace(
            problem, memory=parse_bytes(needed[1])))


# --- what an interval costs, against counting call by call -------------------

def atoms_of(calls, found):
    """The atom of each call."""
    return [bisect.bisect_right(found.starts, here) - 1
            for here in positions(calls, found.order)]


def each_interval(count, atoms):
    """Start and end, and the numbers of the calls inside."""
    for start, end in itertools.combinations(range(count + 1), 2):
        yield start, end, [number for number, atom in enumerate(atoms)
                           if start <= atom < end]


def nbytes(calls, sources):
    return sum(calls[source.call].outputs[source.output].nbytes
               for source in set(sources))


@few
@given(traces(seconds=True), st.data())
def test_an_interval_costs_what_its_calls_do(calls, data):
    found = intervals_of(calls)
    atoms = atoms_of(calls, found)
    for start, end, numbers in each_interval(found.count, atoms):
        inside = [calls[number] for number in numbers]
        for name in 'forward', 'backward':
            assert getattr(found, name)[start, end] == pytest.approx(
                sum(getattr(call, name) for call in inside))
        # A shared parameter counts once, and what two calls keep.
        assert found.parameters[start, end] == sum(
            PARAMETERS[name].nbytes
            for name in {name for call in inside for name in call.parameters})
        assert found.kept[start, end] == nbytes(calls, [
            source for call in inside for source in call.retained]) + sum(
                call.kept for call in inside)
    for index in range(found.count + 1):
        over = {source for call, atom in zip(calls, atoms, strict=True)
                for source in call.inputs
                if atoms[source.call] < index <= atom}
        assert found.crossing[index] == nbytes(calls, over)
    # Atoms are in order, and no link to be whole is in two.
    assert sorted(set(found.starts)) == found.starts
    assert set(atoms) == set(range(found.count))
    for name in {name for call in calls for name in call.whole}:
        assert len({atom for call, atom in zip(calls, atoms, strict=True)
                    if name in call.whole}) == 1
    # The stages of a run are the intervals that were weighed.
    inner = range(1, found.count)
    ends = sorted(data.draw(st.sets(st.sampled_from(inner)))
                  ) if inner else []
    cuts = [found.starts[end] for end in ends]
    whole = intervals_of(calls, cuts=cuts)
    assert whole.count == len(cuts) + 1
    for name in 'forward', 'parameters', 'kept':
        assert [getattr(whole, name)[index, index + 1]
                for index in range(whole.count)] == pytest.approx([
                    getattr(found, name)[start, end] for start, end in
                    itertools.pairwise((0, *ends, found.count))])
    run = Layout(program_of(calls), order_of(calls), cuts)
    assert run.chunks == tuple(bisect.bisect_right(ends, atom)
                               for atom in atoms)
    assert [nbytes(calls, values) for values in run.outgoing[:-1]] == [
        found.crossing[end] for end in ends]


def test_a_loop_is_no_place_for_a_cut():
    found = intervals_of(stacked(3, 4), collections.defaultdict(
        lambda: PARAMETERS['/0/W']))
    assert [start.place for start in found.starts] == [0, 1, 2]


def test_calls_after_the_last_parameter_can_be_cut():
    calls, parameters = chain(1, 1)
    calls[1].parameters = ()
    found = intervals_of(calls, parameters)
    assert found.starts == [Position(0, 0), Position(0, 1)]
    numpy.testing.assert_array_equal(found.crossing, [0, 1000, 0])


def walk(calls, inside, parameters=PARAMETERS):
    """Bytes at the worst moment, with a dictionary of what is there."""
    order = sorted(inside, reverse=True)
    left = collections.Counter(name for number in order
                               for name in calls[number].parameters
                               if name in parameters)
    there, most = {}, 0
    for number in order:
        call = calls[number]
        for output in call.outputs:     # among the call's own arrays
            there.pop(Source(number, output), None)
        most = max(most, call.temporary + sum(there.values()))
        for source in call.inputs:
            value = calls[source.call].outputs[source.output]
            if source.call in inside and value.wants:
                there[source] = value.nbytes
        for name in set(left) & set(call.parameters):
            left[name] -= 1
            there[name] = parameters[name].nbytes
            if not left[name]:
                del there[name]
    return most


@few
@given(traces())
def test_a_pass_back_needs_no_more_than_its_interval_is_said_to(calls):
    found = intervals_of(calls)
    atoms = atoms_of(calls, found)
    for start, end, inside in each_interval(found.count, atoms):
        assert found.temporary[start, end] >= walk(calls, inside)
    assert not numpy.tril(found.temporary).any()


@pytest.mark.parametrize(('kind', 'kept', 'taken'), [
    ('SGD', 0, 1), ('MomentumSGD', 1, 1), ('Adam', 2, 3)])
def test_arrays_of_an_optimizer_are_counted(kind, kept, taken):
    optimizer = getattr(chainer.optimizers, kind)()
    found, temporary = optimizer_arrays(
        optimizer, 'f', chainer.get_device('@numpy'))
    assert found == kept
    assert temporary == pytest.approx(taken, abs=.2)
    assert optimizer.target is None
