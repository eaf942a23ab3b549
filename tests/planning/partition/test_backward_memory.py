"""What a pass back needs, against walking through it visit by visit."""
import collections
import itertools

from chainer_fp8pipe.planning.partition.backward_memory import BackwardMemory
from chainer_fp8pipe.planning.partition.calls import (
    Call,
    Parameter,
    Source,
    Value,
)

import numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.traces import PARAMETERS, few, traces


def walk(calls, inside, parameters=PARAMETERS, plain=False):
    """Bytes at the worst moment, with a dictionary of what is there.

    ``plain``: beyond the gradients of all parameters, of which only those
    that have been made are there.
    """
    rank = []
    for call in calls:
        rank.append(max([rank[source.call] + 1 for source in call.inputs],
                        default=0))
    order = sorted(inside, key=lambda number: (rank[number], number),
                   reverse=True)
    left = collections.Counter(name for number in order
                               for name in calls[number].parameters
                               if name in parameters)
    missing = set(left) if plain else set()
    there, most = {}, 0
    for number in order:
        call = calls[number]
        for output in call.outputs:     # among the call's own arrays
            there.pop(Source(number, output), None)
        most = max(most, call.temporary + sum(there.values()) - sum(
            PARAMETERS[name].nbytes for name in missing))
        for source in call.inputs:
            value = calls[source.call].outputs[source.output]
            if source.call in inside and value.wants:
                there[source] = value.nbytes
        for name in set(left) & set(call.parameters):
            missing.discard(name)
            left[name] -= 1
            there[name] = PARAMETERS[name].nbytes
            if not left[name]:
                del there[name]
    return most


@few
@given(traces(), st.data())
def test_an_interval_needs_what_a_walk_through_its_functions_does(calls,
                                                                  data):
    count = data.draw(st.integers(1, len(calls)))
    atoms = sorted(data.draw(st.lists(
        st.integers(0, count - 1), min_size=len(calls),
        max_size=len(calls))))
    shared, alone = (
        BackwardMemory(calls, dict(enumerate(atoms)), parameters).table(count)
        for parameters in (PARAMETERS, {}))
    for start, end in itertools.combinations(range(count + 1), 2):
        inside = {number for number, atom in enumerate(atoms)
                  if start <= atom < end}
        assert alone[start, end] == walk(calls, inside, {})
        # A parameter may count twice whose readers are visited to and fro.
        assert shared[start, end] >= walk(calls, inside)
    assert not numpy.tril(shared).any()


@few
@given(traces())
def test_plain_chainer_has_no_gradients_of_parameters_before_the_pass(calls):
    found = BackwardMemory(calls, dict.fromkeys(range(len(calls)), 0),
                           PARAMETERS)
    assert found.plain() == walk(calls, set(range(len(calls))), plain=True)


def test_gradients_of_weights_made_for_each_step_wait_for_the_end():
    """A recurrent network whose weights a function makes for each step."""
    size, steps = 1000, 5
    calls = []
    state = None
    for _ in range(steps):
        calls.append(Call('stack', parameters=('/W',), outputs={
            0: Value((size,), numpy.dtype('f'), True)},
            temporary=4 * size))
        calls.append(Call(
            'linear', inputs=(Source(len(calls) - 1, 0),
                              *([state] if state else [])),
            outputs={0: Value((1,), numpy.dtype('f'), True)}))
        state = Source(len(calls) - 1, 0)
    found = BackwardMemory(calls, dict.fromkeys(range(len(calls)), 0), {
        '/W': Parameter((size,), numpy.dtype('f'))})
    assert found.table(1)[0, 1] == 4 * size * steps
