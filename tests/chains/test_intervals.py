"""Costs of intervals, against counting them one by one."""
import bisect
import collections
import itertools

from chainer_fp8pipe.chains.calls import (
    Position,
    Source,
    assign,
    order_of,
    positions,
)
from chainer_fp8pipe.chains.cuts import Intervals

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains.traces import PARAMETERS, chain, few, stacked, traces


def made(calls, parameters=PARAMETERS):
    """Intervals of calls, and the atom of each call."""
    order = order_of(calls)
    found = Intervals(calls, order, parameters)
    return found, [bisect.bisect_right(found.starts, here) - 1
                   for here in positions(calls, order)]


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
    found, atoms = made(calls)
    for start, end, numbers in each_interval(found.count, atoms):
        inside = [calls[number] for number in numbers]
        for name in 'forward', 'backward':
            sums = getattr(found, name)
            own = sum(getattr(call, name) for call in inside)
            assert sums[end] - sums[start] == pytest.approx(own)
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
    assert found.ends_of(cuts) == (*ends, found.count)
    run = assign(calls, order_of(calls), cuts)
    assert run.chunks == tuple(bisect.bisect_right(ends, atom)
                               for atom in atoms)
    assert [nbytes(calls, values) for values in run.crossing] == [
        found.crossing[end] for end in ends]


def test_a_loop_is_no_place_for_a_cut():
    found, _ = made(stacked(3, 4), {})
    assert [start.place for start in found.starts] == [0, 1, 2]


def test_calls_after_the_last_parameter_can_be_cut():
    calls, parameters = chain(1, 1)
    calls[1].parameters = ()
    found, _ = made(calls, parameters)
    assert found.starts == [Position(0, 0), Position(0, 1)]
    numpy.testing.assert_array_equal(found.crossing, [0, 1000, 0])


# --- memory of a pass back --------------------------------------------------

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
    found, atoms = made(calls)
    for start, end, inside in each_interval(found.count, atoms):
        assert found.temporary[start, end] >= walk(calls, inside)
    assert not numpy.tril(found.temporary).any()
