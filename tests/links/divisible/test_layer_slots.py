import contextlib

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from ..helpers import Net, Rank, bits


class Counting:
    """Makes layers and knows which."""

    def __init__(self):
        self.made = []

    def __call__(self, mark):
        self.made.append(mark)
        return L.Linear(2, 2)


def counted(count=4):
    factory = Counting()
    return factory, Divisible(*[lazy(factory, i) for i in range(count)])


def test_nothing_is_built_before_it_is_asked_for():
    factory, model = counted()
    part = model.divide(1, 3)
    assert len(part) == 2
    assert repr(part)
    assert str(part)
    assert part.bounds == ((1, 3),)
    assert model + model[:0]
    model.append(F.relu)
    model.insert(0, F.relu)
    Divisible().extend(model)
    assert factory.made == []


def test_what_is_added_later_is_built_as_well():
    factory, model = counted(1)
    list(model.params())
    model.append(lazy(factory, 1))
    model[0] = lazy(factory, 2)
    assert len(list(model.params())) == 4
    assert factory.made == [0, 2, 1]


def test_links_know_their_numbers_at_once():
    one, two = L.Linear(2, 2), L.Linear(2, 2)
    model = Divisible(F.relu, one)
    model.append(two)
    assert (one.name, two.name) == ('1', '2')
    del model[0]
    model.append(one)
    assert (one.name, two.name) == ('0', '1')
    model.divide(0, 3)
    assert (one.name, two.name) == ('0', '1')


def test_a_part_builds_its_own_layers_once():
    factory, model = counted()
    part = model.divide(1, 3)
    part.cleargrads()
    assert factory.made == [1, 2]
    list(part.params())
    list(model.params())
    assert factory.made == [1, 2, 0, 3]


def test_an_index_builds_that_layer_only():
    factory, model = counted()
    assert model[2] is model[2]
    assert model[-1] is model[3]
    assert factory.made == [2, 3]


@pytest.mark.parametrize('access', [
    lambda model: model.pieces,
    lambda model: list(model),
    lambda model: list(model.children()),
    lambda model: list(model.links()),
    lambda model: list(model.namedlinks()),
    lambda model: list(model.params()),
    lambda model: list(model.namedparams()),
    lambda model: model(np.ones((1, 2), np.float32)),
    lambda model: model.to_device('@numpy'),
    lambda model: chainer.serializers.DictionarySerializer().save(model),
    lambda model: model.copy('share'),
])
def test_everything_else_builds_all(access):
    factory, model = counted()
    access(model)
    assert factory.made == [0, 1, 2, 3]


def test_initial_values_depend_on_seed_and_index_only():
    def model(count, seed=0):
        return Divisible(*[lazy(L.Linear, 2, 2) for _ in range(count)],
                         seed=seed)

    whole = bits(model(4))
    assert len(set(whole.values())) == 5        # all biases are zero
    np.random.seed(1)
    np.random.rand(10)
    for order in ([2, 0, 3, 1], [3, 2, 1, 0]):
        other = model(4)
        for i in order:
            other[i]
        assert bits(other) == whole
    assert bits(model(6)).items() >= whole.items()
    assert bits(model(4, seed=1))['/0/W'] != whole['/0/W']
    later = model(4)
    later.seed = 1                              # not built yet
    assert bits(later) == bits(model(4, seed=1))


def test_building_leaves_the_users_random_numbers_alone():
    np.random.seed(3)
    expected = np.random.rand(2).tolist()
    np.random.seed(3)
    list(Net().params())
    Divisible(L.Linear(None, 2))(np.ones((1, 2), np.float32))
    assert np.random.rand(2).tolist() == expected


def test_parameters_sized_by_the_first_input_do_not_depend_on_the_order():
    def model():
        return Divisible(L.Linear(None, 2), L.Linear(None, 2))

    x = np.ones((1, 2), np.float32)
    whole, second = model(), model().divide(1, 2)
    np.random.rand(3)
    second(whole[0](x))
    whole = model()
    whole(x)
    assert bits(second)['/1/W'] == bits(whole)['/1/W']
    assert bits(whole)['/0/W'] != bits(whole)['/1/W']
    later = model()[:1] + model()[1:]
    second = later.pop()
    later(x)
    later.append(second)
    later(x)
    assert bits(later) == bits(whole)


def test_equal_models_inside_of_a_model_start_with_different_values():
    def block():
        return Divisible(lazy(L.Linear, 2, 2), lazy(L.Linear, 2, 2))

    def chain():
        return chainer.Chain(one=block(), two=block())

    def make():
        return Divisible(block(), block(), chain(), lazy(chain))

    weights = {name: value for name, value in bits(make()).items()
               if name.endswith('W')}
    assert len(weights) == len(set(weights.values())) == 12
    parts = [make().stage(Rank(rank, 4)) for rank in range(4)]
    assert {name: value for part in parts
            for name, value in bits(part).items()} == bits(make())


def test_the_same_lazy_layer_twice_is_one_layer_twice():
    shared = lazy(L.Linear, 2, 2)
    model = Divisible(shared, F.relu, shared)
    assert model[2] is model[0]
    assert [name for name, _ in model.namedparams()] == ['/0/W', '/0/b']
    with pytest.raises(ValueError, match='layer 0 .* and layer 2 .* share'):
        Divisible(shared, F.relu, shared).divide(0, 1)


def broken():
    raise AttributeError('no such thing')


def test_a_layer_that_cannot_be_built_is_named():
    model = Divisible(F.relu, lazy(broken))
    for access in (lambda: model[1], lambda: list(model.params()),
                   lambda: model.pieces):
        with pytest.raises(LayerError, match=(
                r'layer 1 \(broken\) cannot be built: AttributeError: no '
                'such thing')):
            access()


def test_a_layer_inside_that_cannot_be_built_is_named_with_its_model():
    with pytest.raises(LayerError, match=(
            r'layer 0 \(broken\).*inside of layer 1 \(Divisible\)')):
        list(Divisible(F.relu, Divisible(lazy(broken))).params())


def test_a_failure_is_not_remembered():
    answers = [None, L.Linear(2, 2)]
    model = Divisible(lazy(lambda: answers.pop(0)))
    with contextlib.suppress(LayerError):
        list(model.params())
    assert len(list(model.params())) == 2
