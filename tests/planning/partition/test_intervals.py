"""Costs of intervals, against counting them one by one."""
import bisect
import itertools

from chainer_fp8pipe.planning.partition.calls import Source
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import (
    assign,
    order_of,
    positions,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.traces import PARAMETERS, chain, few, stacked, traces


def made(calls):
    """Intervals of calls, and the atom of each call."""
    order = order_of(calls)
    found = Intervals(calls, order, PARAMETERS)
    return found, [bisect.bisect_right(found.starts, here) - 1
                   for here in positions(calls, order)]


def each_interval(count):
    return itertools.combinations(range(count + 1), 2)


def nbytes(calls, sources):
    return sum(calls[source.call].outputs[source.output].nbytes
               for source in set(sources))


@few
@given(traces(seconds=True))
def test_seconds_are_those_of_the_calls(calls):
    found, atoms = made(calls)
    seconds = found.seconds()
    for start, end in each_interval(found.count):
        inside = [call for call, atom in zip(calls, atoms, strict=True)
                  if start <= atom < end]
        forward = sum(call.forward for call in inside)
        backward = sum(call.backward for call in inside)
        assert found.forward[end] - found.forward[start] == (
            pytest.approx(forward))
        assert found.backward[end] - found.backward[start] == (
            pytest.approx(backward))
        assert seconds[start, end] == pytest.approx(forward + backward)


@few
@given(traces())
def test_a_shared_parameter_counts_once_in_an_interval(calls):
    found, atoms = made(calls)
    for start, end in each_interval(found.count):
        names = {name for call, atom in zip(calls, atoms, strict=True)
                 if start <= atom < end for name in call.parameters}
        assert found.parameters[start, end] == sum(
            PARAMETERS[name].nbytes for name in names)


@few
@given(traces())
def test_a_value_that_two_calls_keep_is_kept_once(calls):
    found, atoms = made(calls)
    for start, end in each_interval(found.count):
        inside = [call for call, atom in zip(calls, atoms, strict=True)
                  if start <= atom < end]
        assert found.kept[start, end] == nbytes(calls, [
            source for call in inside for source in call.retained]) + sum(
                call.kept for call in inside)


@few
@given(traces())
def test_what_crosses_was_made_before_and_is_used_after(calls):
    found, atoms = made(calls)
    for index in range(found.count + 1):
        over = {source for call, atom in zip(calls, atoms, strict=True)
                for source in call.inputs
                if atoms[source.call] < index <= atom}
        assert found.crossing[index] == nbytes(calls, over)
        assert found.values[index] == len(over)


@few
@given(traces(), st.data())
def test_the_stages_of_a_run_are_the_intervals_that_were_weighed(calls,
                                                                 data):
    """Cuts at atoms' starts, and what crosses them in a run."""
    found, atoms = made(calls)
    inner = range(1, found.count)
    ends = sorted(data.draw(st.sets(st.sampled_from(inner)))
                  ) if inner else []
    run = assign(calls, order_of(calls), [found.starts[end] for end in ends])
    assert run.stages == tuple(bisect.bisect_right(ends, atom)
                               for atom in atoms)
    assert [nbytes(calls, values) for values in run.crossing] == [
        found.crossing[end] for end in ends]


@few
@given(traces())
def test_no_cut_goes_through_a_link_that_must_be_whole(calls):
    _, atoms = made(calls)
    for name in {name for call in calls for name in call.whole}:
        assert len({atom for call, atom in zip(calls, atoms, strict=True)
                    if name in call.whole}) == 1


@few
@given(traces())
def test_atoms_are_in_the_order_of_their_positions(calls):
    found, atoms = made(calls)
    assert sorted(set(found.starts)) == found.starts
    assert set(atoms) == set(range(found.count))


def test_a_loop_is_no_place_for_a_cut():
    found = Intervals(stacked(3, 4), order_of(stacked(3, 4)), {})
    assert [start.place for start in found.starts] == [0, 1, 2]


def test_calls_after_the_last_parameter_can_be_cut():
    calls, parameters = chain(1, 1)
    calls[1].parameters = ()
    found = Intervals(calls, order_of(calls), parameters)
    assert found.count == 2
    numpy.testing.assert_array_equal(found.crossing, [0, 1000, 0])
    assert calls[1].inputs == (Source(0, 0),)
