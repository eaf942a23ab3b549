import copy
import functools
import pickle

from chainer_fp8pipe.links import Divisible, lazy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import TimerHook
from hypothesis import given
from hypothesis import strategies as st

from ..helpers import INPUT, Net, Rank, bits, linears, marks

POSITIONS = st.integers(-5, 5)
SLICES = st.builds(slice, *[st.none() | POSITIONS] * 2,
                   st.none() | st.integers(1, 3))

#: What can be done: a name, and arguments; 'new' is a layer.
EDITS = st.lists(st.one_of(
    st.tuples(st.just('append')),
    st.tuples(st.just('insert'), POSITIONS),
    st.tuples(st.just('extend'), st.integers(0, 3)),
    st.tuples(st.just('add'), st.integers(0, 3)),
    st.tuples(st.just('pop'), POSITIONS),
    st.tuples(st.just('set'), POSITIONS),
    st.tuples(st.just('set'), SLICES),
    st.tuples(st.just('delete'), POSITIONS | SLICES),
    st.tuples(st.just('remove'), POSITIONS),
    st.tuples(st.just('reverse')),
    st.tuples(st.just('double')),
    st.tuples(st.just('clear'))), max_size=12)


def edit(layers, fresh, name, *arguments):
    """Does the same to a list and to a model."""
    def new(count):
        return [next(fresh) for _ in range(count)]

    if name in ('append', 'insert'):
        getattr(layers, name)(*arguments, *new(1))
    elif name == 'extend':
        layers.extend(iter(new(*arguments)))
    elif name == 'add':
        layers += type(layers)(new(*arguments)) if isinstance(
            layers, list) else Divisible(*new(*arguments))
    elif name == 'double':
        layers.extend(layers)
    elif name == 'set' and isinstance(arguments[0], slice):
        layers[arguments[0]] = new(len(
            range(len(layers))[arguments[0]]))
    elif name == 'set':
        layers[arguments[0]], = new(1)
    elif name == 'delete':
        del layers[arguments[0]]
    elif name == 'remove':
        layers.remove(layers[arguments[0]])
    else:
        return getattr(layers, name)(*arguments)
    return None


@given(st.integers(0, 4), EDITS)
def test_a_model_is_edited_as_a_list_is(size, edits):
    layers = linears(100)
    expected, model = layers[:size], Divisible(*layers[:size])
    fresh, again = iter(layers[size:]), iter(layers[size:])
    for one in edits:
        if one[0] == 'insert' and not -len(model) <= one[1] <= len(model):
            continue        # an error, as in Chainer; tested below
        try:
            wanted = edit(expected, fresh, *one)
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                edit(model, again, *one)
            continue
        assert edit(model, again, *one) is wanted
        assert list(model) == expected
        assert len(model) == len(expected)
        assert list(reversed(model)) == expected[::-1]
        first = {}
        for i, layer in enumerate(expected):
            first.setdefault(layer, i)
        assert [name for name, _ in model.namedlinks(skipself=True)] == [
            f'/{i}' for i in first.values()]
        assert [link.name for link in model.children()] == [
            str(i) for i in first.values()]
        for layer in layers[:8]:
            assert (layer in model) == (layer in expected)
            assert model.count(layer) == expected.count(layer)
            if layer in expected:
                assert model.index(layer) == expected.index(layer)


def test_positions_and_links_are_apart():
    """Functions count: what Chainer got wrong from the third link on."""
    model = Divisible()
    for i in range(12):
        model.append(L.Linear(2, 2, initialW=i))
        model.append(F.relu)
    assert [name for name, _ in model.namedparams()][::2] == [
        f'/{2 * i}/W' for i in range(12)]
    assert marks(model.children()) == list(range(12))
    model.insert(3, F.tanh)
    assert marks(model.children()) == list(range(12))
    del model[0]
    assert marks(model.children()) == list(range(1, 12))
    assert [link.name for link in model.children()][:3] == ['1', '4', '6']


def test_an_index_is_a_position_in_the_whole_list():
    one, two = linears(2)
    model = Divisible(one, two, one)
    assert model.index(one, 1) == 2
    assert model.index(two, -2) == 1
    with pytest.raises(ValueError, match='is not in'):
        model.index(two, 0, 1)


def test_a_lazy_layer_is_found_before_and_after_it_is_built():
    layer = lazy(L.Linear, 2, 2)
    model = Divisible(F.relu, layer)
    assert model.index(layer) == 1
    built = model[1]
    assert layer in model
    assert built in model
    assert model.count(layer) == model.count(built) == 1
    model.remove(layer)
    assert built not in model


def test_layers_are_counted_and_removed_by_type():
    model = Divisible(
        L.Linear(2, 2), F.relu, lazy(L.Linear, 2, 2),
        lazy(lambda: L.Linear(2, 2)), F.relu,
        functools.partial(F.leaky_relu, slope=0.1))
    assert model.count_by_layer_type('Linear') == 3
    assert model.count_by_layer_type('relu') == 2
    assert model.count_by_layer_type('leaky_relu') == 1
    model.remove_by_layer_type('relu')
    model.remove_by_layer_type('nothing')
    assert len(model) == 4
    model.remove_by_layer_type('Linear')
    assert len(model) == 1


def test_removing_functions_does_not_build_layers_before_their_time():
    """They would draw as at the places where they were."""
    model = Divisible(F.relu, lazy(L.Linear, 2, 2))
    model.remove_by_layer_type('relu')
    direct = Divisible(lazy(L.Linear, 2, 2))
    assert (model[0].W.array == direct[0].W.array).all()


@pytest.mark.parametrize(('layer', 'message'), [
    (5, 'a layer must be callable.*not 5'),
    (None, 'a layer must be callable'),
    (L.Linear, r'Linear is a class.*write Linear\(...\) or lazy\(Linear'),
])
def test_adding_something_that_is_no_layer_is_an_error(layer, message):
    model = Divisible(F.relu)
    for add in (model.append, lambda layer: model.insert(0, layer),
                lambda layer: model.extend([F.relu, layer]),
                lambda layer: model.__setitem__(0, layer), Divisible):
        with pytest.raises(ValueError, match=message):
            add(layer)
        assert list(model) == [F.relu]


def test_a_model_is_no_layer_of_itself():
    model = Divisible()
    with pytest.raises(ValueError, match='layer of itself'):
        model.append(model)


@pytest.mark.parametrize('position', [-3, 3])
def test_positions_out_of_range_are_errors(position):
    model = Divisible(F.relu, F.tanh)
    with pytest.raises(IndexError, match='there are 2 layers'):
        model.insert(position, F.relu)
    with pytest.raises(IndexError, match=f'position {position}.*has 2'):
        model[position]
    with pytest.raises(IndexError):
        model[position] = F.relu


def test_only_links_are_added_as_links():
    model = Divisible()
    model.add_link(L.Linear(2, 2))
    with pytest.raises(TypeError, match='not a link'):
        model.add_link(F.relu)


PARTS = {'divided': lambda model: model.divide(1, 3),
         'a stage': lambda model: model.stage(Rank(1, 2)),
         'the only stage': lambda model: model.stage(Rank(0, 1))}


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('change', [
    lambda part: part.append(F.relu),
    lambda part: part.insert(0, F.relu),
    lambda part: part.extend([F.relu]),
    lambda part: part.__iadd__(Divisible(F.relu)),
    lambda part: part.__setitem__(slice(0, 1), [F.relu]),
    lambda part: part.__delitem__(0),
    lambda part: part.pop(),
    lambda part: part.remove(part[0]),
    lambda part: part.remove_by_layer_type('Linear'),
    lambda part: part.clear(),
    lambda part: part.reverse(),
    lambda part: part.repeat(2),
    lambda part: part.flatten(),
])
def test_edits_that_change_numbers_are_errors_on_a_part(part, change):
    part = PARTS[part](Divisible(*linears(4)))
    before = list(part)
    with pytest.raises(ValueError, match=(
            r'is a part, .*Divisible\(\*part\)')):
        change(part)
    assert list(part) == before


def test_a_layer_of_a_part_can_be_replaced():
    whole = Divisible(*linears(4))
    part = whole.divide(1, 3)
    part[1] = L.Linear(2, 2, initialW=9)
    assert marks(part) == [1, 9]
    assert [name for name, _ in part.namedparams()][2] == '/2/W'
    assert part[1].name == '2'
    assert marks(whole) == [0, 1, 2, 3]


def test_the_layers_of_a_part_make_a_new_model():
    model = Divisible(*Divisible(*linears(4)).divide(2, 4))
    model.append(F.relu)
    assert [name for name, _ in model.namedlinks(skipself=True)] == [
        '/0', '/1']


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
def test_copies_share_arrays_in_mode_share_and_layers_if_shallow(duplicate):
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
def test_only_a_sequential_can_be_added(other):
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
