import itertools

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.links.balance import even_parts, measure
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks

from .helpers import Rank, bits, stages


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
    ('memory', "unknown balance 'memory'.*'parameters', 'layers', 'time' and "
     'a list')])
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


EXAMPLE = np.ones((2, 3, 6, 6), np.float32)


def test_shapes_that_come_with_the_input_take_an_example():
    with pytest.raises(ValueError, match=(
            r'layer 0 \(Convolution2D\) learns the shape of its parameters '
            'from its first input; .*example=')):
        convolutional().stage(Rank(0, 1))
    part = convolutional().stage(Rank(0, 1), chunks=2, example=EXAMPLE)
    # 3 * 4 * 9 + 4 and 4 * 16 * 5 + 5
    assert 112 in part.sizes()
    assert 325 in part.sizes()
    assert sizes(part) == [2, 2]


@pytest.mark.parametrize('balance', ['time', 'parameters'])
def test_measuring_leaves_the_model_alone(balance):
    model = convolutional()
    np.random.seed(4)
    expected = np.random.rand()
    np.random.seed(4)
    part = model.stage(Rank(0, 1), balance, example=EXAMPLE)
    assert np.random.rand() == expected
    assert model[0].W.array is None
    part(EXAMPLE)
    untouched = convolutional()
    untouched(EXAMPLE)
    assert bits(part) == bits(untouched)


def test_ranks_that_cannot_tell_each_other_cannot_measure():
    with pytest.raises(ValueError, match='can broadcast.*a Rank cannot'):
        convolutional().stage(Rank(0, 2), 'time', example=EXAMPLE)


def plain(x):
    return x


@pytest.mark.parametrize('of', ['mpi4py', 'ChainerMN', 'ProcessGrid'])
@pytest.mark.parametrize('balance', ['time', 'parameters'])
@on_ranks(2, 4)
def test_all_ranks_cut_where_rank_0_says(comm, of, balance):
    """Nobody else measures; on a grid, rank 0 does so for all pipelines."""
    ran = []

    def noted(x):
        ran.append(x)
        return x

    everyone = comm
    if of == 'ChainerMN':
        import chainermn
        comm = chainermn.create_communicator('naive', mpi_comm=comm)
    if of == 'ProcessGrid':
        from chainer_fp8pipe.mpi.grid import ProcessGrid
        comm = ProcessGrid(comm, pipeline=2)
    model = Divisible(noted, lazy(L.Linear, None, 3), *[plain] * 4)
    part = model.stage(
        comm, balance, example=None if everyone.rank else EXAMPLE)
    assert set(everyone.allgather(part.layout)) == {part.layout}
    assert bool(ran) == (everyone.rank == 0)
    if of == 'ProcessGrid':
        assert part.bounds[0] == part.layout[comm.stage_index]
        comm.free()


@on_ranks(2)
def test_a_failure_on_rank_0_is_raised_on_all_ranks(comm):
    def attempt(message, example, *layers, balance='time'):
        with pytest.raises(ValueError, match=message):
            Divisible(*layers).stage(comm, balance, example=example)

    attempt('there is no input to measure with',
            EXAMPLE if comm.rank else None, plain, plain)
    attempt(r'layer 1 \(Linear\) learns the shape',
            EXAMPLE if comm.rank else None, plain, L.Linear(None, 2),
            balance='parameters')
    attempt(r"LayerError: layer 1 \(fails\), while it was measured: "
            "KeyError: 'no'", EXAMPLE, plain, fails)


# --- dividing ----------------------------------------------------------

def merit(costs, counts):
    """What is to be small: first the largest sum, then unevenness."""
    ends = list(itertools.accumulate(counts))
    sums = [sum(costs[start:end])
            for start, end in zip([0, *ends], ends, strict=False)]
    return (max(sums), sum(cost ** 2 for cost in sums),
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
    ([1] * 1000, 8, [125] * 8), ([3, 0] * 512, 64, [16] * 64),
    # Filling parts one after the other up to the mean (5) would give
    # [1, 1, 3] with a part of 9.
    ([5, 1, 3, 3, 3], 3, [1, 2, 2])])
def test_large_models_are_quick_and_equal_layers_get_equal_shares(
        costs, parts, counts):
    assert even_parts(costs, parts) == counts


# --- measuring --------------------------------------------------------------

X = np.ones((2, 3), np.float32)


class Watched(chainer.Link):
    """Says what was done with it."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        with self.init_scope():
            self.w = chainer.Parameter(np.ones(3, np.float32))

    def __deepcopy__(self, memo):
        return Watched(self.log)

    def forward(self, x):
        self.log.append(('forward', chainer.config.train, x.requires_grad))
        y = F.scale(x, self.w)
        y.node.creator_node.add_hook(self.Backward(self.log))
        return y

    class Backward(chainer.FunctionHook):
        name = 'watched'

        def __init__(self, log):
            self.log = log

        def backward_postprocess(self, function, inputs, gradients):
            self.log.append('backward')


def test_each_layer_runs_forward_and_backward_as_in_training():
    first, second = [], []
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = measure(Divisible(Watched(first), Watched(second)), X, True)
    # Once before the time is taken, then three times.
    assert first == [('forward', True, False), 'backward'] * 4
    assert second == [('forward', True, True), 'backward'] * 4
    assert [one.parameters for one in found] == [3, 3]
    assert all(one.seconds > 0 for one in found)


def test_forward_alone_is_enough_to_count():
    log = []
    assert measure(Divisible(Watched(log)), X, False) == [(3, 0.0)]
    assert log == [('forward', True, False)]


def test_any_layers_can_be_measured():
    inner = Divisible(lazy(L.Linear, 3, 3))
    model = Divisible(
        lambda x: (x, x), lambda x, y: x + y, lazy(L.Linear, None, 3),
        inner, L.BatchNormalization(3), F.dropout, F.argmax,
        lambda x: x.array, lambda x: x.reshape(1, 1).array)
    found = measure(model, (X,), True)
    assert [one.parameters for one in found] == [0, 0, 12, 12, 6, 0, 0, 0, 0]
    assert model[4].avg_mean.tolist() == [0, 0, 0]
    assert [p.grad for p in model[4].params()
            if not np.isnan(p.grad).all()] == []


def fails(x):
    raise KeyError('no')


def test_a_layer_that_fails_is_named():
    with pytest.raises(LayerError, match=r'layer 1 \(fails\).*KeyError'):
        measure(Divisible(F.relu, fails), X, True)
    with pytest.raises(LayerError, match=r'layer 0 \(<lambda>\).*None'):
        measure(Divisible(lambda x: None), X, True)
    with pytest.raises(ValueError, match='example=x'):
        measure(Divisible(F.relu), None, True)
