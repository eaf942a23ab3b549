import functools

from chainer_fp8pipe.links import Divisible, lazy

import chainer.functions as F
import chainer.links as L
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..helpers import Rank, linears, marks

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


@settings(deadline=None)
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
def test_what_is_no_layer_is_an_error(layer, message):
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
def test_what_would_change_numbers_is_an_error_on_a_part(part, change):
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
