import itertools

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.links.balance import even_parts

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import Rank, stages


def sizes(part):
    return [end - start for start, end in part.layout]


def wide(*widths):
    """Linear layers of these many weights, without biases, as lazies."""
    return Divisible(*[lazy(L.Linear, width, 1, nobias=True)
                       for width in widths])


def test_parameters_are_the_measure_unless_said_otherwise():
    np.random.seed(2)
    expected = np.random.rand()
    np.random.seed(2)
    parts = stages(lambda: wide(8, 1, 1, 1, 1, 4), 3)
    assert np.random.rand() == expected     # counting draws none
    assert {part.layout for part in parts} == {((0, 1), (1, 5), (5, 6))}
    part = wide(100, 1, 1, 1).stage(Rank(0, 2), balance='layers')
    assert sizes(part) == [2, 2]
    part = wide(1, 1, 1, 1, 1).stage(Rank(1, 2), balance=(1, 2, 1, 1),
                                     chunks=2)
    assert part.bounds == ((1, 3), (4, 5))


@pytest.mark.parametrize(('balance', 'message'), [
    *((counts, '2 numbers of layers, one for each chunk, all 1 or more and 5 '
       'together') for counts in (
        [5], [2, 2], [2, 2, 1], [5, 0], [6, -1], [])),
    ('memory', "unknown balance 'memory'.*'parameters', 'layers' and a list")])
def test_a_measure_that_cannot_be_is_an_error(balance, message):
    with pytest.raises(ValueError, match=message):
        wide(1, 1, 1, 1, 1).stage(Rank(0, 2), balance=balance)


def test_shared_parameters_count_where_they_are_first():
    link, later = L.Linear(2, 2), lazy(L.Linear, 3, 3)
    tied = L.Linear(2, 2)
    with tied.init_scope():
        tied.W = link.W
    inner = Divisible(lazy(L.Linear, 2, 2), L.Linear(None, 2))
    model = Divisible(link, later, link, tied, later, F.relu, link.forward,
                      chainer.Chain(a=later, b=L.Linear(1, 1)), inner)
    assert model.sizes() == [6, 12, 0, 2, 0, 0, 0, 2, None]


def test_a_tail_without_parameters_can_be_cut():
    model = Divisible(L.Linear(9, 9), F.relu, F.relu, F.relu)
    assert sizes(model.stage(Rank(0, 4))) == [1, 1, 1, 1]
    assert sum(sizes(model.stage(Rank(0, 3)))) == 4


def convolutional():
    return Divisible(L.Convolution2D(None, 4, 3), F.relu,
                     lazy(L.Linear, None, 5), F.dropout)


def test_shapes_that_come_with_the_input_are_not_counted():
    with pytest.raises(ValueError, match=(
            r'layer 0 \(Convolution2D\) learns the shape of its parameters '
            "from its first input; .*balance='layers' or a list")):
        convolutional().stage(Rank(0, 1))
    assert sizes(convolutional().stage(Rank(0, 2), 'layers')) == [2, 2]


# --- dividing ----------------------------------------------------------

def merit(costs, counts):
    """What is to be small: unevenness of costs, then of counts."""
    ends = list(itertools.accumulate(counts))
    sums = [sum(costs[start:end])
            for start, end in zip([0, *ends], ends, strict=False)]
    return (sum(cost ** 2 for cost in sums),
            sum(count ** 2 for count in counts))


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10 ** 30)),
                min_size=1, max_size=9), st.data())
def test_no_other_cut_is_better(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    counts = even_parts(costs, parts)
    assert len(counts) == parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert merit(costs, counts) == min(
        merit(costs, [end - start for start, end in itertools.pairwise(
            [0, *ends, len(costs)])])
        for ends in itertools.combinations(range(1, len(costs)), parts - 1))


@pytest.mark.parametrize(('costs', 'parts', 'counts'), [
    ([1] * 400, 8, [50] * 8), ([3, 0] * 160, 20, [16] * 20),
    # Filling parts one after the other up to the mean (5) would give
    # [1, 1, 3] with a part of 9.
    ([5, 1, 3, 3, 3], 3, [1, 2, 2])])
def test_large_models_are_quick_and_equal_layers_get_equal_shares(
        costs, parts, counts):
    assert even_parts(costs, parts) == counts
