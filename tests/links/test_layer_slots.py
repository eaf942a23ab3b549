import contextlib
import io

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from .helpers import INPUT, Net, Rank, bits, linears


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
    model.append(F.relu)
    Divisible().extend(model)
    assert factory.made == []


def test_layers_added_later_are_built_as_well():
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
    model[0] = two
    assert (one.name, two.name) == ('1', '0')
    model.divide(0, 3)
    assert (one.name, two.name) == ('1', '0')


def test_a_part_builds_its_own_layers_once():
    factory, model = counted()
    part = model.divide(1, 3)
    part.cleargrads()
    assert factory.made == [1, 2]
    list(part.params())
    assert model[-1] is model[3]
    assert factory.made == [1, 2, 3]        # an index builds that layer only
    list(model.params())
    assert factory.made == [1, 2, 3, 0]


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
                'such thing')) as caught:
            access()
        assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(LayerError, match=(
            r'layer 0 \(broken\).*inside of layer 1 \(Divisible\)')):
        list(Divisible(F.relu, Divisible(lazy(broken))).params())
    answers = [None, L.Linear(2, 2)]        # a failure is not remembered
    model = Divisible(lazy(lambda: answers.pop(0)))
    with contextlib.suppress(LayerError):
        list(model.params())
    assert len(list(model.params())) == 2


X = np.ones((1, 2), np.float32)


def saved(model):
    """What ``save_npz`` writes, as a dictionary."""
    file = io.BytesIO()
    chainer.serializers.save_npz(file, model)
    return file.getvalue(), dict(np.load(io.BytesIO(file.getvalue())))


def load(file, model, **options):
    chainer.serializers.load_npz(io.BytesIO(file), model, **options)


# --- running ----------------------------------------------------------------

def test_forward_equals_that_of_chainers_sequential():
    layers = [L.Linear(3, 4), F.relu, L.BatchNormalization(4),
              L.Linear(4, 2)]
    np.testing.assert_array_equal(
        Divisible(*layers)(INPUT).array,
        chainer.Sequential(*layers)(INPUT).array)


@pytest.mark.parametrize('kind', [tuple, list])
def test_several_outputs_are_the_next_layers_arguments(kind):
    model = Divisible(lambda x: kind([x, 2 * x]), lambda x, y: (y, x + y),
                      lambda y, z: y * z)
    assert model(3) == 6 * 9
    assert model.divide(1, 3)(3, 6) == 6 * 9


def test_a_layer_that_returns_nothing_is_named():
    model = Divisible(F.relu, lambda x: None, F.relu)
    with pytest.raises(TypeError, match=r'layer 1 \(<lambda>\) returned '
                                        'None'):
        model(X)
    for empty in Divisible(), Net()[2:2]:
        with pytest.raises(RuntimeError, match='does not have any layer'):
            empty(X)


def test_a_divisible_trains_with_chainers_own_updater():
    def trained(model):
        optimizer = chainer.optimizers.Adam().setup(
            L.Classifier(model))
        data = chainer.datasets.TupleDataset(
            INPUT, np.array([0, 1, 0, 1, 1], np.int32))
        updater = chainer.training.StandardUpdater(
            chainer.iterators.SerialIterator(data, 2, shuffle=False),
            optimizer)
        for _ in range(5):
            updater.update()
        # Not params(): Chainer's are in a wrong order.
        return [layer.W.array for layer in model
                if isinstance(layer, L.Linear)]

    model, other = Divisible(*Net()), chainer.Sequential(*Net())
    for mine, theirs in zip(trained(model), trained(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# --- names ------------------------------------------------------------------

def test_a_link_at_two_places_is_yielded_once_under_its_first_name():
    link = chainer.Sequential(L.Linear(2, 2), L.Linear(2, 2))
    tied = L.Linear(2, 2)
    with tied.init_scope():
        tied.W = link[0].W
    model = Divisible(link, F.relu, link, tied, chainer.Chain(a=link[1]))
    assert [name for name, _ in model.namedparams()] == [
        '/0/0/W', '/0/0/b', '/0/1/W', '/0/1/b', '/3/b']
    assert [name for name, _ in model.namedlinks()] == [
        '/', '/0', '/0/0', '/0/1', '/3', '/4']
    assert list(model.params()) == [
        parameter for _, parameter in model.namedparams()]
    assert list(model.links()) == [link for _, link in model.namedlinks()]
    assert list(model.links(skipself=True)) == list(model.links())[1:]
    assert list(model.children()) == [link, tied, model[4]]
    assert model.count_params() == 6 + 6 + 2
    model.cleargrads()      # an optimizer steps once
    optimizer = chainer.optimizers.SGD(lr=1).setup(model)
    before = link[0].W.array.copy()
    link[0].W.grad = np.full_like(before, 0.25)
    optimizer.update()
    np.testing.assert_allclose(link[0].W.array, before - 0.25, rtol=1e-6)
    part = Net().divide(2, 5)
    assert [name for name, _ in chainer.Chain(
        predictor=part).namedparams()][:2] == [
        '/predictor/2/W', '/predictor/2/b']


def test_parameters_without_a_shape_can_be_left_out():
    model = Divisible(L.Linear(None, 2), L.Linear(2, 2))
    assert len(list(model.params())) == 4
    assert [name for name, _ in model.namedparams(include_uninit=False)] == [
        '/0/b', '/1/W', '/1/b']
    with pytest.warns(UserWarning, match='/0/W'):
        assert model.count_params() == 2 + 6


# --- gradients and devices ---------------------------------------------------

def test_gradients_are_cleared_and_added_by_numbers():
    whole, other = Divisible(*linears(4)), Divisible(*linears(4))
    for number, link in enumerate(whole):
        link.W.grad = np.full((2, 2), number, np.float32)
    part = other.divide(1, 3)
    part.cleargrads()
    part.addgrads(whole)
    part.addgrads(whole)
    assert [link.W.grad[0, 0] for link in part] == [2, 4]
    part.cleargrads()
    assert part[0].W.grad is None


def test_values_are_copied_by_numbers():
    whole, part = Divisible(*linears(4)), Divisible(*linears(4)[::-1])[1:3]
    part.copyparams(whole)
    assert [link.W.array[0, 0] for link in part] == [1, 2]
    one, two = [Divisible(F.relu, L.BatchNormalization(2))
                for _ in range(2)]
    one[1].avg_mean[...] = 3
    two.copyparams(one, copy_persistent=False)
    assert two[1].avg_mean[0] == 0
    two.copyparams(one)
    assert two[1].avg_mean[0] == 3
    part.copyparams(chainer.Sequential(*linears(4)[::-1]))
    assert [link.W.array[0, 0] for link in part] == [2, 1]
    for copying in (whole.copyparams, whole.addgrads):
        with pytest.raises(ValueError, match=r'layer 0 \(Linear\) is not'):
            copying(part)
        with pytest.raises(ValueError, match=r'is not in Linear'):
            copying(L.Linear(2, 2))


def test_a_device_is_for_all_layers():
    model = Net()
    assert model.to_device('@numpy') is model
    assert model.to_cpu().xp is np
    visited = []

    class Visitor(chainer.device_resident.DeviceResidentsVisitor):
        def visit_device_resident(self, resident):
            visited.append(id(resident))

        def visit_variable(self, parameter):
            visited.append(id(parameter))

    model.device_resident_accept(Visitor())
    assert sorted(visited) == sorted(
        map(id, [*model.links(), *model.params()]))


def test_updates_can_be_switched_off():
    model = Net()
    chainer.optimizers.SGD().setup(model)
    assert model.update_enabled
    part = model.divide(2, 4)
    part.disable_update()
    assert not part.update_enabled
    assert [p.update_rule.enabled for p in model.params()] == [
        True, True, False, False, True, True]


# --- files ------------------------------------------------------------------

def test_the_parts_files_make_up_the_file_of_the_whole():
    _, whole = saved(Net())
    assert sorted(whole) == ['0/W', '0/b', '2/W', '2/b', '4/W', '4/b']
    merged = {}
    for rank in range(3):
        _, part = saved(Net().stage(Rank(rank, 3)))
        assert not set(part) & set(merged)
        merged.update(part)
    assert sorted(merged) == sorted(whole)
    assert all((merged[key] == whole[key]).all() for key in whole)


def test_any_part_loads_its_layers_from_the_file_of_the_whole():
    whole = Net()
    for parameter in whole.params():
        parameter.array[...] = np.random.rand(*parameter.shape)
    file, _ = saved(whole)
    for start, end in [(0, 5), (0, 1), (1, 4), (2, 5)]:
        part = Net().divide(start, end)
        load(file, part)
        assert bits(part).items() <= bits(whole).items()


def test_loading_more_than_a_file_has_is_an_error_when_strict():
    file, _ = saved(Net().divide(2, 5))
    with pytest.raises(KeyError, match='0/'):
        load(file, Net())
    part = Net()
    load(file, part, strict=False)
    assert bits(part) == bits(Net())


def test_a_file_gives_parameters_their_shapes():
    filled = Divisible(L.Linear(None, 2), F.relu)
    filled(X)
    file, keys = saved(filled)
    assert sorted(keys) == ['0/W', '0/b']
    empty = Divisible(lazy(L.Linear, None, 2), F.relu)
    load(file, empty)
    assert bits(empty) == bits(filled)


# --- what it cannot have ----------------------------------------------------

def scoped(model):
    with model.init_scope():
        model.link = L.Linear(2, 2)


@pytest.mark.parametrize('register', [
    scoped,
    lambda model: model.add_param('W', (2, 2)),
    lambda model: model.add_persistent('mean', 3),
    lambda model: model.register_persistent('width'),
])
def test_only_layers_can_be_registered(register):
    with pytest.raises(TypeError, match='Net holds layers only.*append'):
        register(Net())
