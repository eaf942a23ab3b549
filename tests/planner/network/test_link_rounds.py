from collections import Counter

from chainer_fp8pipe.planner.network.link_rounds import (
    ends,
    local_pairs,
    local_rounds,
    one_way,
    pair,
    ranks_by_host,
    ring_rounds,
    shifts,
    torus_one_way,
    torus_rounds,
    torus_steps,
)
from chainer_fp8pipe.planning.cluster import Cluster

import pytest
from hypothesis import given
from hypothesis import strategies as st

MEMBERS = st.lists(st.integers(0, 999), min_size=2, max_size=70, unique=True)
SIDES = st.integers(1, 6)


@given(MEMBERS)
def test_in_each_round_every_member_sends_once_and_hears_once(members):
    for messages in ring_rounds(members):
        sources, targets = zip(*messages, strict=True)
        assert sorted(sources) == sorted(targets) == sorted(members)
        assert all(source != target for source, target in messages)


@given(MEMBERS)
def test_every_member_has_another_target_in_each_round(members):
    messages = [message for messages in ring_rounds(members)
                for message in messages]
    assert len(set(messages)) == len(messages)


@pytest.mark.parametrize(('members', 'rounds'), [
    (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (64, 6),
    (1024, 10), (1025, 11)])
def test_rounds_grow_as_the_logarithm_of_the_hosts(members, rounds):
    assert len(shifts(members)) == len(ring_rounds(range(members))) == rounds


def links(rows, columns):
    """Both directions of all links of a torus, by its coordinates."""
    found = set()
    for row in range(rows):
        for column in range(columns):
            for other in (((row + 1) % rows, column),
                          (row, (column + 1) % columns)):
                here, there = (place[0] * columns + place[1]
                               for place in ((row, column), other))
                if here != there:
                    found |= {(here, there), (there, here)}
    return found


@given(SIDES, SIDES)
def test_rounds_on_a_torus_use_each_direction_of_each_link_once(
        rows, columns):
    rounds = torus_rounds(range(rows * columns), rows, columns)
    messages = Counter(message for messages in rounds for message in messages)
    assert set(messages) == links(rows, columns)
    assert set(messages.values()) <= {1}
    assert len(rounds) <= 2


@given(SIDES, SIDES)
def test_neighbours_on_a_torus_are_those_of_the_engine(rows, columns):
    cluster = Cluster(range(rows * columns), 1.0, 0.0, (rows, columns))
    for messages in torus_steps(range(rows * columns), rows, columns):
        assert all(len(cluster.route(*message)) == 1 for message in messages)


@given(SIDES, SIDES)
def test_one_way_on_a_torus_leaves_the_other_direction_idle(rows, columns):
    if rows * columns == 1:
        return
    messages = torus_one_way(range(rows * columns), rows, columns)
    assert messages
    assert set(messages) <= links(rows, columns)
    assert not {message[::-1] for message in messages} & set(messages)
    assert len({source for source, _ in messages}) == len(messages)


@given(MEMBERS)
def test_one_way_nobody_both_sends_and_hears(members):
    ranks = [rank for message in one_way(members) for rank in message]
    assert len(ranks) == len(set(ranks)) == len(members) // 2 * 2


def test_a_pair_sends_both_ways():
    assert pair((3, 5)) == ((3, 5), (5, 3))


def test_ranks_of_hosts_are_found_wherever_they_are():
    assert ranks_by_host([0, 1, 0, 2, 1]) == [[0, 2], [1, 4], [3]]


def test_local_rounds_stay_inside_hosts_and_leave_no_rank_out():
    hosts = [0, 1, 0, 2, 1, 0, 0]
    rounds = local_rounds(hosts)
    assert len(rounds) == 2         # the largest host has four ranks
    for messages in rounds:
        assert all(hosts[source] == hosts[target]
                   for source, target in messages)
    assert {source for source, _ in rounds[0]} == {0, 1, 2, 4, 5, 6}
    assert {source for source, _ in rounds[1]} == {0, 2, 5, 6}


def test_local_pairs_are_one_of_each_host_that_has_two_ranks():
    assert local_pairs([0, 1, 0, 2, 1, 0]) == (
        (0, 2), (2, 0), (1, 4), (4, 1))


def test_ends_are_the_peers_of_a_rank():
    assert ends(((0, 1), (1, 2), (2, 1)), 1) == ([2], [0, 2])
