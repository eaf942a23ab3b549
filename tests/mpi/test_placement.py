from collections import Counter

from chainer_fp8pipe.mpi.placement import pipelines, torus_shape

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


@given(jobs())
def test_as_many_pipelines_as_possible_are_inside_a_node(job):
    """The most that there can be is a count of whole ones per node."""
    nodes, stages = job
    lines = pipelines(nodes, stages)
    assert {len(line) for line in lines} == {stages}
    assert sorted(sum(lines, [])) == list(range(len(nodes)))
    assert sum(len({nodes[rank] for rank in line}) == 1
               for line in lines) == sum(
        size // stages for size in Counter(nodes).values())
    for line in lines:          # a node's ranks are neighbours
        assert [nodes[rank] for rank in line] == sorted(
            nodes[rank] for rank in line)


@pytest.mark.parametrize(('nodes', 'stages', 'lines'), [
    ([0, 0, 1, 1], 2, [[0, 1], [2, 3]]),
    ([0, 1, 0, 1], 2, [[0, 2], [1, 3]]),
    # Nodes of 5 and 4 ranks, pipelines of 3: one inside each, 2 + 1 left.
    ([0] * 5 + [1] * 4, 3, [[0, 1, 2], [3, 4, 8], [5, 6, 7]])])
def test_pipelines_derived_by_hand(nodes, stages, lines):
    assert pipelines(nodes, stages) == lines


@pytest.mark.parametrize(('ranks', 'per_node', 'shape'), [
    (12, 4, (3, 4)), (12, 1, (3, 4)), (12, 12, (3, 4)), (12, 5, (3, 4)),
    (16, 1, (4, 4)), (7, 1, (1, 7)), (1, 1, (1, 1)), (2, 1, (1, 2)),
    (32, 8, (4, 8)), (10, 5, (2, 5)), (12, 0, (3, 4))])
def test_a_torus_has_a_row_per_node_or_is_nearly_square(ranks, per_node,
                                                        shape):
    assert torus_shape(ranks, per_node) == shape
