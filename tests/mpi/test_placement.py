from collections import Counter

from chainer_fp8pipe.mpi.placement import place, torus_shape

import pytest
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def jobs(draw):
    """Nodes of ranks, in any order, and a number of stages."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    ranks = [node for node, size in enumerate(sizes) for _ in range(size)]
    stages = draw(st.sampled_from(
        [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]))
    return draw(st.permutations(ranks)), stages


@given(jobs(), st.sampled_from(['pipeline', 'data', 'auto']))
def test_every_rank_has_one_place(job, inside):
    nodes, stages = job
    placement = place(nodes, stages, inside)
    assert len(placement.ranks) == stages
    assert {len(row) for row in placement.ranks} == {len(nodes) // stages}
    assert sorted(sum(placement.ranks, ())) == list(range(len(nodes)))


@given(jobs(), st.sampled_from(['pipeline', 'data']))
def test_as_many_lines_as_possible_stay_inside_a_node(job, inside):
    """The most that there can be is a count of whole lines per node."""
    nodes, stages = job
    placement = place(nodes, stages, inside)
    lines = (list(zip(*placement.ranks, strict=True))
             if inside == 'pipeline' else placement.ranks)
    length = len(lines[0])
    assert sum(len({nodes[rank] for rank in line}) == 1
               for line in lines) == sum(
        size // length for size in Counter(nodes).values())


@given(jobs())
def test_the_ranks_of_a_node_are_neighbours_in_a_pipeline(job):
    nodes, stages = job
    for line in zip(*place(nodes, stages, 'pipeline').ranks, strict=True):
        seen = [nodes[rank] for rank in line]
        assert seen == sorted(seen)


TWO_NODES = [0, 0, 1, 1]


@pytest.mark.parametrize(('nodes', 'stages', 'ranks', 'crossings'), [
    # A pipeline stays inside a node by default; ranks are stages x replicas.
    (TWO_NODES, 2, ((0, 2), (1, 3)), (0, 2)),
    ([0, 1, 0, 1], 2, ((0, 1), (2, 3)), None),
    # 8 stages do not fit into nodes of 4; 2 replicas do.
    ([rank // 4 for rank in range(16)], 8, None, (6, 0)),
    # Nodes of 5 and 4 ranks, pipelines of 3: one inside each, 2 + 1 left.
    ([0] * 5 + [1] * 4, 3, ((0, 3, 5), (1, 4, 6), (2, 8, 7)), None),
    # 2, 2, 1 and 1 ranks, pipelines of 3: two nodes each, not three.
    ([0, 0, 1, 1, 2, 3], 3, ((0, 2), (1, 3), (4, 5)), None),
])
def test_places_derived_by_hand(nodes, stages, ranks, crossings):
    placement = place(nodes, stages, 'auto')
    assert ranks is None or placement.ranks == ranks
    assert crossings in (None, (placement.pipeline_crossings,
                                placement.data_crossings))


def test_a_table_of_64_ranks_fits_on_a_terminal():
    table = place([rank // 8 for rank in range(64)], 8).table()
    assert len(table) == 9
    assert max(map(len, table)) < 80
    assert table[0].split() == ['stage', '\\', 'replica', *'01234567']
    assert table[2].split() == [
        '1', '1@0', '9@1', '17@2', '25@3', '33@4', '41@5', '49@6', '57@7']
    long = place([0] * 64, 2).table()
    assert len(long) == 33
    assert long[0].split() == ['replica', '\\', 'stage', '0', '1']
    assert long[-1].split() == ['31', '62@0', '63@0']


@pytest.mark.parametrize(('ranks', 'per_node', 'shape'), [
    (12, 4, (3, 4)), (12, 1, (3, 4)), (12, 12, (3, 4)), (12, 5, (3, 4)),
    (16, 1, (4, 4)), (7, 1, (1, 7)), (1, 1, (1, 1)), (2, 1, (1, 2)),
    (32, 8, (4, 8)), (10, 5, (2, 5)), (12, 0, (3, 4))])
def test_a_torus_has_a_row_per_node_or_is_nearly_square(ranks, per_node,
                                                        shape):
    assert torus_shape(ranks, per_node) == shape
