"""Where a list of layers is cut, and what no cut may go through."""
import functools
import itertools

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.links.divisible import even_parts
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from tests.ranks import on_ranks


def wide(*widths):
    """Linear layers of these many weights, without biases, as lazies."""
    return Divisible(*[lazy(L.Linear, width, 1, nobias=True)
                       for width in widths])


def test_parameters_are_the_measure_unless_said_otherwise():
    np.random.seed(2)
    expected = np.random.rand()
    np.random.seed(2)
    assert wide(8, 1, 1, 1, 1, 4).share(0, 3).layout == (
        (0, 1), (1, 5), (5, 6))
    assert np.random.rand() == expected     # counting draws none
    assert wide(100, 1, 1, 1).share(0, 2, 'layers').layout == (
        (0, 2), (2, 4))
    part = wide(1, 1, 1, 1, 1).share(1, 2, balance=(1, 2, 1, 1), chunks=2)
    assert part.bounds == ((1, 3), (4, 5))


@pytest.mark.parametrize(('balance', 'message'), [
    *((counts, '2 numbers of layers, one for each chunk, all 1 or more and 5 '
       'together') for counts in ([5], [2, 2, 1], [5, 0], [6, -1], [])),
    ('memory', "balance='memory' does not fit.*'parameters', 'layers', or 2"),
    ('parameters', r'layer 4 \(Linear\) learns the shape of its parameters '
     "from its first input; .*balance='layers' or a list")])
def test_a_measure_that_cannot_be_is_an_error(balance, message):
    model = wide(1, 1, 1, 1)
    model.append(L.Linear(None, 4))
    with pytest.raises(ValueError, match=message):
        model.share(0, 2, balance)
    assert model.share(0, 2, 'layers').layout == ((0, 2), (2, 5))


def test_shared_parameters_count_where_they_are_first():
    link, later = L.Linear(2, 2), lazy(L.Linear, 3, 3)
    model = Divisible(
        link, later, link, tied(link), later, F.relu, link.forward,
        chainer.Chain(a=later, b=L.Linear(1, 1)),
        Divisible(lazy(L.Linear, 2, 2), L.Linear(1, 2)))
    assert model.sizes() == [6, 12, 0, 2, 0, 0, 0, 2, 10]


def merit(costs, counts):
    """What is to be small: unevenness of costs, then of counts."""
    ends = list(itertools.accumulate(counts))
    return (sum(sum(costs[start:end]) ** 2
                for start, end in zip([0, *ends], ends, strict=False)),
            sum(count ** 2 for count in counts))


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10 ** 30)),
                min_size=1, max_size=9), st.data())
def test_no_other_cut_is_better(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    counts = even_parts(costs, parts)
    assert (len(counts), sum(counts)) == (parts, len(costs))
    assert min(counts) >= 1
    assert merit(costs, counts) == min(
        merit(costs, [end - start for start, end in itertools.pairwise(
            [0, *ends, len(costs)])])
        for ends in itertools.combinations(range(1, len(costs)), parts - 1))


# --- what is shared ----------------------------------------------------------

GLOBAL = L.Linear(2, 2)


class Caller:
    """A layer that is no link, but has one."""

    def __init__(self, link):
        self.link = link

    def __call__(self, x):
        return self.link(x)


def tied(link):
    """A link whose parameter is that of another."""
    other = L.Linear(2, 2)
    with other.init_scope():
        other.W = link.W
    return other


USES = {
    'the link itself': lambda link: link,
    'a chain that has it': lambda link: chainer.Chain(inner=link),
    'its parameter': tied,
    'its array': lambda link: link.copy('share'),
    'a lazy argument': lambda link: lazy(chainer.Sequential, link),
    'a model': lambda link: Divisible(lazy(L.Linear, 2, 2), link),
}


@pytest.mark.parametrize('use', USES)
def test_a_link_used_on_both_sides_is_found(use):
    link = L.Linear(2, 2)
    for layers in itertools.permutations([link, USES[use](link)]):
        with pytest.raises(ValueError, match=(
                r'layer 0 \(.*\) and layer 1 \(.*\) share')):
            Divisible(*layers).share(0, 2, 'layers')


def test_what_is_not_shared_may_be_cut():
    """Functions, equal values, sizes to come, and the model itself."""
    class Net(Divisible):
        def scaled(self, x, by):
            return x * by

    activation = Caller(np.tanh)
    model = Net(F.relu, activation, L.Linear(2, 2, initialW=0),
                L.Linear(None, 2), F.relu, activation,
                L.Linear(2, 2, initialW=0), L.Linear(None, 2))
    model.append(lambda x: x * len(model))
    model.append(functools.partial(model.scaled, by=2))
    assert model.share(0, 2, [4, 6]).bounds == ((0, 4),)


#: Functions that use the parameter of a link that they hold in secret.
HIDDEN = {
    'a bound argument': lambda link: functools.partial(
        lambda x, link: link(x), link=link),
    'its method': lambda link: link.forward,
    'a closure': lambda link: lambda x: F.linear(x, link.W),
    'an object': Caller,
    'a global': lambda link: lambda x: F.linear(x, GLOBAL.W),
}


@pytest.mark.parametrize('hidden', HIDDEN)
@on_ranks(2)
def test_a_function_that_uses_a_parameter_of_another_rank_is_refused(
        comm, hidden):
    model = Divisible(GLOBAL, F.relu, HIDDEN[hidden](GLOBAL), F.relu)
    model = model.stage(comm, balance='layers')
    x = np.ones((4, 2), 'f')
    pipeline = Pipeline(chainer.optimizers.SGD().setup(model), comm,
                        micro_batches=2)
    with pytest.raises(RuntimeError, match=(
            r'layer 2 .* uses the parameter W of layer 0 \(Linear\), which')):
        pipeline.step(*[x, np.zeros(4, 'i')][:2 * (comm.rank == 0)])


def test_parameters_that_no_layer_has_may_be_used():
    """Of a pretrained network that is not trained, say."""
    other = L.Linear(2, 2)
    part = Divisible(L.Linear(2, 2), lambda x: other(x), F.relu).stage(
        MPI.COMM_SELF)
    Pipeline(chainer.optimizers.SGD().setup(part), MPI.COMM_SELF,
             micro_batches=2).step(np.ones((4, 2), 'f'), np.zeros(4, 'i'))
