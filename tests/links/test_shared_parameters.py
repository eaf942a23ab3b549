import functools
import itertools

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.links.shared_parameters import things_used

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

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
    'a closure': lambda link: lambda x: F.linear(x, link.W),
    'a default': lambda link: lambda x, link=link: link(x),
    'a keyword default': lambda link: lambda x, *, link=link: link(x),
    'a bound argument': lambda link: functools.partial(apply, link=link),
    'its method': lambda link: link.forward,
    'an object': Caller,
    'a list in a closure': lambda link: (
        lambda links: lambda x: links[0](x))([link]),
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


def test_a_link_of_the_module_is_found():
    with pytest.raises(ValueError, match=(
            r'layer 0 \(Linear\) and layer 1 \(uses_global\) share')):
        Divisible(GLOBAL, uses_global).divide(1, 2)


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


def test_a_closure_without_a_value_yet_is_no_obstacle():
    def make():
        def layer(x):
            return later(x)
        found = things_used(layer)
        later = L.Linear(2, 2)
        return found, things_used(layer), later

    before, after, link = make()
    assert before == []
    assert any(thing is link for thing in after)


def test_things_that_refer_to_each_other_end():
    def one(x):
        return two(x)

    def two(x):
        return one(x)

    assert things_used(one) == []
