"""Ranks end if and only if a graph of their actions has no cycle."""
import collections
from graphlib import CycleError, TopologicalSorter

from chainer_fp8pipe.planning.deadlock import (
    NO_MESSAGE,
    Deadlock,
    Effect,
    runnable_order,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st


def effect(rank, action):
    """Of actions (what, other rank)."""
    what, other = action
    return {'send': Effect(sends=(rank, other)),
            'receive': Effect(awaits=(other, rank)),
            'compute': NO_MESSAGE}[what]


def ends(programs):
    """By a graph: the n-th receive of a channel needs its n-th send."""
    graph, sends = {}, {}
    for rank, program in enumerate(programs):
        count = collections.Counter()
        for place, (what, other) in enumerate(program):
            graph[rank, place] = {(rank, place - 1)} if place else set()
            if what == 'send':
                sends[rank, other, count[other]] = rank, place
                count[other] += 1
    for rank, program in enumerate(programs):
        count = collections.Counter()
        for place, (what, other) in enumerate(program):
            if what == 'receive':
                needed = sends.get((other, rank, count[other]))
                count[other] += 1
                if needed is None:
                    return False
                graph[rank, place].add(needed)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


ACTIONS = st.tuples(st.sampled_from(['send', 'receive', 'compute']),
                    st.integers(0, 2))


@given(st.lists(st.lists(ACTIONS, max_size=6), min_size=3, max_size=3))
def test_ranks_end_unless_a_graph_has_a_cycle_or_a_message_is_missing(
        programs):
    done, waits = [[] for _ in programs], ()
    try:
        for rank, action in runnable_order(programs, effect):
            done[rank].append(action)
    except Deadlock as error:
        waits = error.waits
    assert ends(programs) == (not waits)
    assert [(rank, program[len(mine)]) for rank, (mine, program)
            in enumerate(zip(done, programs, strict=True))
            if len(mine) < len(program)] == list(waits)


@given(st.lists(st.lists(ACTIONS, max_size=6), min_size=3, max_size=3))
def test_no_message_is_received_before_it_was_sent(programs):
    messages = collections.Counter()
    try:
        for rank, (what, other) in runnable_order(programs, effect):
            if what == 'receive':
                messages[other, rank] -= 1
                assert messages[other, rank] >= 0
            elif what == 'send':
                messages[rank, other] += 1
    except Deadlock:
        pass


def test_ranks_that_wait_are_named_with_what_they_wait_for():
    programs = [[('send', 1), ('receive', 2)], [('receive', 0)],
                [('receive', 0), ('send', 0)]]
    with pytest.raises(Deadlock) as caught:
        list(runnable_order(programs, effect))
    assert caught.value.said('the plan', 'waits at', lambda action: action[0]
                             ) == ('the plan comes to a deadlock: rank 0 '
                                   'waits at receive, rank 2 waits at '
                                   'receive')
