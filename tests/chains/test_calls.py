"""Any row of cuts gives stages that data go through in one direction."""
from chainer_fp8pipe.chains.calls import (
    Call,
    Position,
    Source,
    order_of,
    positions,
)
from chainer_fp8pipe.chains.layout import Layout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains.traces import (
    PARAMETERS,
    few,
    going_on,
    program_of,
    stacked,
)

STAGES = 4


@st.composite
def cut_traces(draw):
    """A trace, some of whose values are of an earlier batch, and cuts."""
    calls = draw(going_on(STAGES))
    order = order_of(calls)
    cuts = draw(st.lists(st.builds(
        Position, st.integers(0, max(len(order), 1)), st.integers(0, 4)),
        min_size=STAGES - 1, max_size=STAGES - 1, unique=True))
    return calls, order, tuple(sorted(cuts))


def check_direction(calls, stages):
    """Nothing goes back to an earlier stage."""
    for number, call in enumerate(calls):
        assert all(stages[number] >= stages[source.call]
                   for source in call.inputs)


@few
@given(cut_traces(), st.data())
def test_calls_values_and_parameters_are_where_the_cuts_say(given, data):
    calls, order, cuts = given
    every = [Source(number, output) for number, call in enumerate(calls)
             for output in call.outputs]
    some = st.lists(st.sampled_from(every), max_size=3)
    wanted = data.draw(some)
    found = Layout(program_of(calls, wanted), order, cuts)
    stages = found.chunks
    check_direction(calls, stages)
    pins = [call.pinned for call in calls]
    assert all(pin in (None, stage)
               for pin, stage in zip(pins, stages, strict=True))
    if pins == [None] * len(pins):      # a stage lies between two cuts
        assert stages == tuple(sum(cut <= here for cut in cuts)
                               for here in positions(calls, order))
    users = {}
    for call, stage in zip(calls, stages, strict=True):
        for name in call.parameters:
            users.setdefault(name, set()).add(stage)
    assert found.holders == {name: tuple(sorted(of))
                             for name, of in users.items()}

    def is_needed(source, boundary):
        """Values cross from where they are made to their last use."""
        after = [stages[number] > boundary
                 for number, call in enumerate(calls)
                 if source in call.inputs]
        after += [source in wanted]
        return stages[source.call] <= boundary and any(after)
    assert len(found.outgoing[:-1]) == len(cuts)
    for boundary, values in enumerate(found.outgoing[:-1]):
        assert len(set(values)) == len(values)
        assert set(values) == {source for source in every
                               if is_needed(source, boundary)}


@few
@given(cut_traces(), st.data())
def test_a_call_with_a_home_is_there(given, data):
    """With what it reads before it, and what reads it after it."""
    calls, order, cuts = given
    if any(call.pinned is not None for call in calls):
        return
    number = data.draw(st.integers(0, len(calls) - 1))
    home = data.draw(st.integers(0, len(cuts)))
    calls[number].reads = ('/kept',)
    stages = Layout(
        program_of(calls), order, cuts, {'/kept': home}).chunks
    assert stages[number] == home
    check_direction(calls, stages)
    now = Layout(program_of(calls), order, cuts)
    if now.chunks[number] == home:
        assert stages == now.chunks


@few
@given(going_on(1))
def test_an_order_has_every_parameter_once(calls):
    used = {name for call in calls for name in call.parameters}
    for names in ([], list(PARAMETERS)):
        found = [name for group in order_of(calls, names) for name in group]
        assert sorted(found) == sorted(used.union(names))


def test_an_unused_parameter_is_where_the_one_before_it_is():
    calls = [Call('a', path=(0,), parameters=('/a/W',)),
             Call('b', path=(1,), parameters=('/b/W',),
                  inputs=(Source(0, 0),))]
    assert order_of(calls, ['/0', '/a/W', '/a/x', '/a/y', '/b/W', '/c']) == (
        ('/0',), ('/a/W',), ('/a/x',), ('/a/y',), ('/b/W',), ('/c',))


@pytest.mark.parametrize('lateral', [False, True])
@pytest.mark.parametrize('steps', [1, 2, 7])
def test_a_recurrent_model_is_cut_between_layers_for_any_length(steps,
                                                                lateral):
    """The order is that of three steps; a link's parameters are together."""
    order = order_of(stacked(4, 3, lateral))
    assert [name for group in order for name in group] == [
        f'/{layer}/{name}/W' for layer in range(4)
        for name in ('upward', 'lateral')[:1 + lateral]]
    cuts = [Position(order.index((f'/{layer}/upward/W',)), 0)
            for layer in (1, 3)]
    calls = stacked(4, steps, lateral)
    stages = Layout(program_of(calls), order, cuts).chunks
    assert [(int(call.link[1:]), stage) for call, stage
            in zip(calls, stages, strict=True) if call.name == 'lstm'] == [
                (0, 0), (1, 1), (2, 1), (3, 2)] * steps
