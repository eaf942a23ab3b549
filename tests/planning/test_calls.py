"""Any row of cuts gives stages that data go through in one direction."""
from chainer_fp8pipe.planning.calls import (
    Call,
    Position,
    Source,
    Value,
    assign,
    order_of,
    positions,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.traces import (
    PARAMETERS,
    few,
    going_on,
    is_floating,
    stacked,
    traces,
)


@st.composite
def traces_and_cuts(draw, state=False):
    """A trace, the order of its parameters, and sorted cuts."""
    stages = draw(st.integers(1, 5))
    calls = draw(going_on(stages) if state else traces())
    order = order_of(calls)
    cuts = draw(st.lists(st.builds(
        Position, st.integers(0, max(len(order), 1)), st.integers(0, 4)),
        min_size=stages - 1, max_size=stages - 1, unique=True))
    return calls, order, tuple(sorted(cuts))


@few
@given(going_on(3))
def test_a_call_comes_after_what_it_reads(calls):
    place = positions(calls, order_of(calls))
    floating = is_floating(calls)
    for number, call in enumerate(calls):
        for source in call.inputs:
            if floating[source.call]:
                assert place[number] >= place[source.call]
            else:
                assert place[number] > place[source.call]


@few
@given(traces())
def test_what_reads_the_batch_only_is_where_it_is_first_needed(calls):
    place = positions(calls, order_of(calls))
    for number, floats in enumerate(is_floating(calls)):
        users = [place[user] for user, call in enumerate(calls)
                 if number in [source.call for source in call.inputs]]
        if floats and users:
            assert place[number] == min(users)


@few
@given(traces_and_cuts(state=True))
def test_nothing_goes_back_to_an_earlier_stage(given):
    calls, order, cuts = given
    stages = assign(calls, order, cuts).stages
    for number, call in enumerate(calls):
        for source in call.inputs:
            assert stages[number] >= stages[source.call]
        if call.pinned is not None:
            assert stages[number] == call.pinned


@few
@given(traces_and_cuts(), st.data())
def test_a_call_with_a_home_is_there(given, data):
    """With what it reads before it, and what reads it after it."""
    calls, order, cuts = given
    number = data.draw(st.integers(0, len(calls) - 1))
    home = data.draw(st.integers(0, len(cuts)))
    stages = assign(calls, order, cuts, homes={number: home}).stages
    assert stages[number] == home
    for other, call in enumerate(calls):
        for source in call.inputs:
            assert stages[other] >= stages[source.call]
    now = assign(calls, order, cuts)
    if now.stages[number] == home and not is_floating(calls)[number]:
        assert stages == now.stages


@few
@given(traces_and_cuts())
def test_a_stage_is_what_lies_between_two_cuts(given):
    calls, order, cuts = given
    place = positions(calls, order)
    stages = assign(calls, order, cuts).stages
    assert stages == tuple(sum(cut <= here for cut in cuts)
                           for here in place)


@few
@given(traces_and_cuts(), st.data())
def test_values_cross_from_where_they_are_made_to_their_last_use(given,
                                                                 data):
    calls, order, cuts = given
    every = [Source(number, output) for number, call in enumerate(calls)
             for output in call.outputs]
    some = st.lists(st.sampled_from(every), max_size=3)
    wanted, group = data.draw(some), data.draw(some)
    found = assign(calls, order, cuts, wanted, [group])
    stages = found.stages

    def is_needed(source, boundary):
        after = [stages[number] > boundary
                 for number, call in enumerate(calls)
                 if source in call.inputs]
        after += [source in wanted]
        after += [stages[other.call] > boundary for other in group
                  if source in group]
        return stages[source.call] <= boundary and any(after)
    assert len(found.crossing) == len(cuts)
    for boundary, values in enumerate(found.crossing):
        assert len(set(values)) == len(values)
        assert set(values) == {source for source in every
                               if is_needed(source, boundary)}


@few
@given(traces_and_cuts())
def test_holders_are_the_stages_that_use_a_parameter(given):
    calls, order, cuts = given
    found = assign(calls, order, cuts)
    users = {}
    for call, stage in zip(calls, found.stages, strict=True):
        for name in call.parameters:
            users.setdefault(name, set()).add(stage)
    assert found.holders == {name: tuple(sorted(stages))
                             for name, stages in users.items()}


@few
@given(traces())
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


def test_parameters_of_a_link_stay_together_whenever_they_are_first_used():
    found = [name for group in order_of(stacked(3, 2, lateral=True))
             for name in group]
    assert found == [f'/{layer}/{name}/W' for layer in range(3)
                     for name in ('upward', 'lateral')]


@pytest.mark.parametrize('lateral', [False, True])
@pytest.mark.parametrize('steps', [1, 2, 7])
def test_a_recurrent_model_is_cut_between_layers_for_any_length(steps,
                                                                lateral):
    """The order is that of three steps."""
    order = order_of(stacked(4, 3, lateral))
    cuts = [Position(order.index((f'/{layer}/upward/W',)), 0)
            for layer in (1, 3)]
    calls = stacked(4, steps, lateral)
    stages = assign(calls, order, cuts).stages
    assert [(int(call.link[1:]), stage) for call, stage
            in zip(calls, stages, strict=True) if call.name == 'lstm'] == [
                (0, 0), (1, 1), (2, 1), (3, 2)] * steps


def test_a_mask_made_of_the_batch_is_computed_by_its_first_user():
    def value():
        return {0: Value((2,), numpy.dtype('f'), True)}
    calls = [
        Call('mask', outputs=value()),
        Call('scaled', inputs=(Source(0, 0),), outputs=value()),
        Call('a', path=(2,), parameters=('/a',), outputs=value()),
        Call('b', path=(3,), parameters=('/b',), outputs=value(),
             inputs=(Source(2, 0), Source(1, 0))),
        Call('c', path=(4,), parameters=('/c',), outputs=value(),
             inputs=(Source(3, 0), Source(0, 0)))]
    found = assign(calls, order_of(calls), (Position(1, 0), Position(2, 0)))
    assert found.stages == (1, 1, 0, 1, 2)
    assert found.crossing == ((Source(2, 0),), (Source(0, 0), Source(3, 0)))
