import copy
import pickle

from chainer_fp8pipe.links import Divisible, lazy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import TimerHook

from ..helpers import INPUT, Net, Rank, bits, linears, marks

COPIES = {
    'share': lambda model: model.copy(),
    'copy': lambda model: model.copy('copy'),
    'deepcopy': copy.deepcopy,
    'pickle': lambda model: pickle.loads(pickle.dumps(model)),
    'shallow': copy.copy,
}


@pytest.mark.parametrize('duplicate', COPIES)
@pytest.mark.parametrize('built', [False, True])
@pytest.mark.parametrize('cut', [lambda model: model,
                                 lambda model: model.divide(2, 5),
                                 lambda model: model.stage(Rank(1, 2))])
def test_a_copy_is_of_the_class_and_has_the_same_values(
        duplicate, built, cut):
    model = cut(Net())
    if built:
        list(model.params())
    model.name = 'predictor'
    other = COPIES[duplicate](model)
    assert type(other) is Net
    assert other is not model
    assert other.name is None or duplicate in ('deepcopy', 'pickle')
    assert (other.bounds, other.layout, other.total, other.width) == (
        model.bounds, model.layout, 5, 4)
    assert str(other).splitlines()[0].startswith('Net: ')
    assert bits(other) == bits(model)


@pytest.mark.parametrize('duplicate', COPIES)
def test_what_a_copy_shares(duplicate):
    model = Divisible(*linears(2))
    other = COPIES[duplicate](model)
    same_arrays = other[0].W.array is model[0].W.array
    assert same_arrays == (duplicate in ('share', 'shallow'))
    assert (other[0] is model[0]) == (duplicate == 'shallow')
    other.append(F.relu)
    assert len(model) == 2


@pytest.mark.parametrize('duplicate', ['share', 'copy', 'deepcopy', 'pickle'])
def test_a_layer_at_two_places_stays_one(duplicate):
    link, later = L.Linear(2, 2), lazy(L.Linear, 2, 2)
    other = COPIES[duplicate](Divisible(link, later, link, later))
    assert other[0] is other[2]
    assert other[1] is other[3]
    assert len(list(other.params())) == 4


def test_an_initial_copy_draws_new_values():
    for model in (Net(), Divisible(L.Linear(2, 2)),
                  Divisible(Divisible(lazy(L.Linear, 2, 2)))):
        np.random.seed(5)
        one, two = model.copy('init'), model.copy('init')
        np.random.seed(5)
        again = model.copy('init')
        weights = [next(iter(bits(each).values()))
                   for each in (model, one, two)]
        assert len(set(weights)) == 3
        assert bits(again) == bits(one)


def test_an_initial_copy_builds_no_lazy_layers():
    inner = Divisible(lazy(L.Linear, 2, 2))
    other = Divisible(inner, lazy(L.Linear, 2, 2)).copy('init')
    assert 'not counted yet' in str(inner)
    assert 'not counted yet' in str(other)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="'share', 'copy' or 'init'"):
        Net().copy('deep')
    with pytest.raises(ValueError, match="'share', 'copy' or 'init'"):
        Net().repeat(2, 'deep')


def test_a_copy_calls_its_own_methods():
    model = Net()
    for duplicate in ('copy', 'deepcopy', 'pickle'):
        other = COPIES[duplicate](model)
        assert other[3].__self__ is other


def test_a_lambda_can_be_copied_but_not_pickled():
    model = Divisible(L.Linear(3, 2), lambda x: 2 * x)
    for duplicate in ('share', 'copy', 'deepcopy', 'shallow'):
        other = COPIES[duplicate](model)
        np.testing.assert_array_equal(other(INPUT).array,
                                      model(INPUT).array)
    with pytest.raises(ValueError, match=r'layer 1 \(<lambda>\) cannot be '
                                         'pickled'):
        pickle.dumps(model)
    with pytest.raises(ValueError, match=r'layer 0 \(<lambda>\)'):
        pickle.dumps(Divisible(lazy(lambda: L.Linear(2, 2))))


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_will_do(protocol):
    model = Net().divide(2, 5)
    other = pickle.loads(pickle.dumps(model, protocol))
    assert type(other) is Net
    assert other.bounds == model.bounds
    assert bits(other) == bits(model)


def test_hooks_of_a_copy_are_its_own():
    model = Divisible(*linears(2))
    model.add_hook(TimerHook())
    other = model.copy()
    other.delete_hook('TimerHook')
    assert list(model.local_link_hooks) == ['TimerHook']


# --- sums -------------------------------------------------------------------

def test_a_sum_has_the_layers_of_both_and_the_class_of_the_first():
    one, two = Net(), Divisible(*linears(2))
    both = one + two
    assert type(both) is Net
    assert type(two + one) is Divisible
    assert list(both) == [*one, *two]
    assert [name for name, _ in both.namedlinks(skipself=True)] == [
        '/0', '/2', '/4', '/5', '/6']
    assert len(one) == 5


def test_names_do_not_depend_on_other_models_of_the_same_links():
    one, two = Divisible(*linears(2)), Divisible(*linears(2))
    for outer in (one + two, chainer.Sequential(*one, *two)):
        assert len(outer) > 2
    assert [name for name, _ in two.namedparams()] == [
        '/0/W', '/0/b', '/1/W', '/1/b']
    saved = chainer.serializers.DictionarySerializer()
    saved.save(two)
    assert sorted(saved.target) == ['0/W', '0/b', '1/W', '1/b']
    second = two[1]
    del two[0]
    assert list(two) == [second]


def test_chainers_sequential_can_be_added_from_both_sides():
    model, other = Net(), chainer.Sequential(L.Linear(2, 2), F.relu)
    for both in (model + other, other + model):
        assert type(both) is Net
        assert len(both) == 7


@pytest.mark.parametrize('other', [5, [F.relu], chainer.Chain()])
def test_nothing_else_can_be_added(other):
    model = Net()
    for add in (lambda: model + other, lambda: other + model,
                lambda: model.__iadd__(other)):
        with pytest.raises((ValueError, TypeError)):
            add()


def test_parts_that_follow_each_other_are_the_whole_again():
    whole = Net()
    both = whole[:2] + whole[2:]
    assert both.bounds == ((0, 5),)
    assert bits(both) == bits(Net())
    both.append(F.relu)                     # it is no part any more
    middle = whole[1:2] + whole[2:4]
    assert middle.bounds == ((1, 4),)
    assert [name for name, _ in middle.namedparams()] == ['/2/W', '/2/b']
    assert (whole[:0] + whole).bounds == ((0, 5),)


@pytest.mark.parametrize(('first', 'second'), [
    (lambda net: net[:2], lambda net: net[3:]),         # a gap
    (lambda net: net[2:], lambda net: net[:2]),         # the wrong order
    (lambda net: net[:2], lambda net: Divisible(F.relu)),
    (lambda net: Divisible(F.relu), lambda net: net[1:]),
    (lambda net: net[:2], lambda net: chainer.Sequential(F.relu)),
    (lambda net: net[:2], lambda net: (net + Divisible(F.relu))[2:]),
    (lambda net: net[:2], lambda net: Divisible(*net, seed=1)[2:]),
])
def test_other_parts_cannot_be_added(first, second):
    net = Net()
    with pytest.raises(ValueError, match=r'do not follow each other.*'
                                         r'Divisible\(\*first, \*second\)'):
        first(net) + second(net)


# --- repeating --------------------------------------------------------------

@pytest.mark.parametrize('mode', ['init', 'copy', 'share'])
def test_a_repeated_model_is_a_model_of_models(mode):
    model = Net().repeat(3, mode)
    assert type(model) is Net
    assert [type(layer) for layer in model] == [Net] * 3
    weights = [next(iter(bits(layer).values())) for layer in model]
    assert len(set(weights)) == (3 if mode == 'init' else 1)


def test_a_repeated_model_can_be_cut_between_its_models():
    part = Net().repeat(3).divide(1, 2)
    assert [name for name, _ in part.namedparams()][:2] == ['/1/0/W',
                                                            '/1/0/b']


def test_models_that_share_arrays_cannot_be_cut_apart():
    with pytest.raises(ValueError, match='layer 0 .*layer 1 .*an array'):
        Net().repeat(2, 'share').divide(0, 1)


def test_nothing_repeated_is_an_empty_model():
    assert len(Net().repeat(0)) == 0


def test_a_flat_model_has_the_layers_of_the_models_inside():
    inner = chainer.Sequential(L.Linear(2, 2), F.relu)
    model = Divisible(F.tanh, Divisible(inner, lazy(L.Linear, 2, 2)),
                      lazy(Divisible, F.sigmoid),
                      lazy(lambda: chainer.Sequential(F.elu)))
    flat = model.flatten()
    assert [getattr(layer, '__name__', '') or type(layer).__name__
            for layer in flat] == ['tanh', 'Linear', 'relu', 'Linear',
                                   'sigmoid', 'elu']
    assert len(model) == 4


def test_a_flat_repeated_model_starts_as_one_written_out():
    def block():
        return Divisible(lazy(L.Linear, 2, 2), F.relu)

    flat = block().repeat(3).flatten()
    assert len(flat) == 6
    assert bits(flat) == bits(Divisible(
        *[layer for _ in range(3)
          for layer in (lazy(L.Linear, 2, 2), F.relu)]))


def test_a_model_of_marked_layers_keeps_their_order_when_repeated():
    assert marks(Divisible(*linears(3)).repeat(2, 'copy').flatten()) == [
        0, 1, 2, 0, 1, 2]
