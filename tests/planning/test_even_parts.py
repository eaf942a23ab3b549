import itertools
from fractions import Fraction

from chainer_fp8pipe.planning.even_parts import partition

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

COSTS = st.lists(st.one_of(
    st.integers(0, 5), st.integers(0, 10 ** 30),
    st.floats(0, 1e300), st.floats(0, 1)), min_size=1, max_size=9)


def all_cuts(layers, parts):
    for cuts in itertools.combinations(range(1, layers), parts - 1):
        yield [end - start for start, end in itertools.pairwise(
            [0, *cuts, layers])]


def merit(costs, counts):
    """What is to be small: first the largest sum, then unevenness."""
    ends = list(itertools.accumulate(counts))
    sums = [sum(map(Fraction, costs[start:end]))
            for start, end in zip([0, *ends], ends, strict=False)]
    return (max(sums), sum(cost ** 2 for cost in sums),
            sum(count ** 2 for count in counts))


@given(COSTS, st.data())
def test_no_other_cut_is_better(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    counts = partition(costs, parts)
    assert len(counts) == parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert merit(costs, counts) == min(
        merit(costs, cut) for cut in all_cuts(len(costs), parts))


@pytest.mark.parametrize(('costs', 'parts', 'counts'), [
    ([1, 1, 1, 1, 1, 1], 3, [2, 2, 2]),
    # Filling parts one after the other up to the mean (5) would give
    # [1, 1, 3] with a part of 9.
    ([5, 1, 3, 3, 3], 3, [1, 2, 2]),
    # A tail without parameters still has to be somewhere.
    ([9, 0, 0, 0], 3, [1, 1, 2]),
    ([0, 0, 0, 0], 2, [2, 2]),
    ([7], 1, [1]),
    # The 0.5 is better off on the left; rounded sums would not tell.
    ([1e16, 0, 0, 0, 0.5, 1e16 + 2], 2, [5, 1]),
])
def test_examples_by_hand(costs, parts, counts):
    result = partition(costs, parts)
    assert sorted(result) == sorted(counts)
    assert merit(costs, result) == merit(costs, counts)


def test_large_models_are_quick_and_equal_layers_get_equal_shares():
    assert partition([0.1] * 1000, 8) == [125] * 8
    assert partition([3, 0] * 512, 64) == [16] * 64
    assert partition(np.array([1, 1, 2], np.float32), 2) == [2, 1]


@pytest.mark.parametrize(('costs', 'parts', 'message'), [
    ([1, 2], 3, '2 layers cannot be cut into 3'),
    ([1, 2], 0, '1 part or more, not 0'),
    ([1, -2], 1, 'cost of layer 1 is -2'),
    ([1, float('nan')], 1, 'cost of layer 1 is nan'),
    ([float('inf'), 1], 1, 'cost of layer 0 is inf'),
])
def test_what_cannot_be_cut_is_an_error(costs, parts, message):
    with pytest.raises(ValueError, match=message):
        partition(costs, parts)
