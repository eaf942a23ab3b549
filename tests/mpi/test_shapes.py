from chainer_fp8pipe.mpi.shapes import divisors, torus_shape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(('ranks', 'per_node', 'shape'), [
    (12, 4, (3, 4)), (12, 1, (3, 4)), (12, 12, (3, 4)), (12, 5, (3, 4)),
    (16, 1, (4, 4)), (7, 1, (1, 7)), (1, 1, (1, 1)), (2, 1, (1, 2)),
    (32, 8, (4, 8)), (10, 5, (2, 5)), (12, 0, (3, 4))])
def test_a_torus_has_a_row_per_node_or_is_nearly_square(ranks, per_node,
                                                        shape):
    assert torus_shape(ranks, per_node) == shape


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 20))
def test_a_torus_has_all_ranks(ranks, per_node):
    rows, columns = torus_shape(ranks, per_node)
    assert rows * columns == ranks


def test_divisors_divide():
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(13) == [1, 13]
