import functools
import itertools

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

GLOBAL = L.Linear(2, 2)


def uses_global(x):
    return F.linear(x, GLOBAL.W)


def apply(x, link):
    return link(x)


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
    'a bound argument': lambda link: functools.partial(apply, link=link),
    'its method': lambda link: link.forward,
    'a lazy argument': lambda link: lazy(chainer.Sequential, link),
    'a model': lambda link: Divisible(lazy(L.Linear, 2, 2), link),
}


@pytest.mark.parametrize('use', USES)
def test_a_link_used_on_both_sides_is_found(use):
    link = L.Linear(2, 2)
    for layers in itertools.permutations([link, USES[use](link)]):
        model = Divisible(*layers)
        with pytest.raises(ValueError, match=(
                r'layer 0 \(.*\) and layer 1 \(.*\) share')):
            model.divide(0, 1)


def test_functions_and_equal_values_are_not_shared():
    activation = Caller(np.tanh)
    model = Divisible(F.relu, activation, L.Linear(2, 2, initialW=0),
                      F.relu, activation, L.Linear(2, 2, initialW=0))
    assert model.divide(0, 3).bounds == ((0, 3),)


def test_links_sized_by_their_input_share_nothing():
    """Their arrays are None both."""
    model = Divisible(L.Linear(None, 2), L.Linear(None, 2))
    assert model.divide(0, 1).bounds == ((0, 1),)


def test_a_function_may_refer_to_the_model():
    class Net(Divisible):
        def __init__(self):
            super().__init__(L.Linear(2, 2), L.Linear(2, 2))
            self.factor = 3
            self.append(lambda x: x * self.factor)
            self.append(functools.partial(self.scaled, by=2))
            self.append(L.Linear(2, 2))

        def scaled(self, x, by):
            return x * by * self.factor

    whole = Net()
    assert whole.divide(0, 2).bounds == ((0, 2),)
    assert whole.divide(1, 5).divide(2, 4).bounds == ((2, 4),)


#: Functions that use the parameter of a link that they hold in secret.
HIDDEN = {
    'a closure': lambda link: lambda x: F.linear(x, link.W),
    'a default': lambda link: lambda x, link=link: link(x),
    'an object': Caller,
    'a list in a closure': lambda link: (
        lambda links: lambda x: links[0](x))([link]),
    'a global': lambda link: uses_global,
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
    model = Divisible(L.Linear(2, 2), lambda x: other(x), F.relu)
    x = np.ones((4, 2), 'f')
    part = model.stage(MPI.COMM_SELF)
    Pipeline(chainer.optimizers.SGD().setup(part), MPI.COMM_SELF,
             micro_batches=2).step(x, np.zeros(4, 'i'))
