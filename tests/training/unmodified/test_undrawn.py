"""A script's model has the values of one process, made when asked for."""
import contextlib
import copy
import pickle
import tracemalloc

from chainer_fp8pipe.chains.placeholder import is_placeholder
from chainer_fp8pipe.training.unmodified import undrawn as module
from chainer_fp8pipe.training.unmodified.undrawn import Undrawn

import chainer
import chainer.links as L
import numpy
import pytest
from chainer import initializers


@pytest.fixture(autouse=True)
def every_parameter_is_large(monkeypatch):
    monkeypatch.setattr(module, '_SMALL', 0)
    monkeypatch.setattr(module, '_CHUNK', 5)


class Rewritten(chainer.Link):
    """Reads its values while it is built, and writes to them."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.W = chainer.Parameter(initializers.Normal(), (3, 4))
        self.W.array[0] = 7


class Vector(chainer.Link):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.v = chainer.Parameter(initializers.Uniform(2), 11)


def doubled(array):
    array[...] = numpy.random.rand(*array.shape) * 2


def sequence(*links):
    return chainer.Sequential(*links)


def in_half_precision():
    with chainer.using_config('dtype', numpy.float16):
        return L.Linear(5, 3)


MODELS = {
    'layers': lambda: sequence(
        L.Linear(7, 5), L.Convolution2D(2, 3, 3), L.BatchNormalization(4),
        L.EmbedID(5, 3), L.LSTM(3, 4)),
    **{kind.__name__: lambda kind=kind: L.Linear(7, 3, initialW=kind())
       for kind in (
           initializers.Normal, initializers.LeCunNormal,
           initializers.GlorotNormal, initializers.HeNormal,
           initializers.Uniform, initializers.LeCunUniform,
           initializers.GlorotUniform, initializers.HeUniform,
           initializers.Orthogonal)},
    'a vector': lambda: Vector(),
    'an array': lambda: L.Linear(3, 2, initialW=numpy.ones((2, 3), 'f')),
    "an initializer of one's own": lambda: L.Linear(3, 2, initialW=doubled),
    'a generator of its own': lambda: L.Linear(
        3, 2, initialW=initializers.Normal(rng=numpy.random.RandomState(3))),
    'repeated': lambda: L.Linear(4, 4).repeat(3),
    'repeated copies': lambda: L.Linear(4, 4).repeat(3, mode='copy'),
    'shared': lambda: L.Linear(4, 4).repeat(3, mode='share'),
    'a deep copy': lambda: copy.deepcopy(sequence(L.Linear(4, 4))),
    'pickled': lambda: pickle.loads(pickle.dumps(L.Linear(4, 4))),
    'half precision': in_half_precision,
    'read while it is built': lambda: sequence(
        L.Linear(3, 3), Rewritten(), L.Linear(3, 3)),
    'moved to the CPU': lambda: sequence(L.Linear(3, 3)).to_cpu(),
}


def made(make, undrawn):
    """The model, and what the generator gives after it was made."""
    numpy.random.seed(5)
    with undrawn.building() if undrawn else contextlib.nullcontext():
        numpy.random.normal()       # one of a pair: the other is kept
        model = make()
        return model, numpy.random.rand(3).tolist()


def values(model):
    return {name: parameter.array for name, parameter in model.namedparams()}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        numpy.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize('make', MODELS.values(), ids=MODELS)
def test_values_and_the_generator_are_those_of_one_process(make):
    expected, after = made(make, None)
    found, found_after = made(make, Undrawn(lambda: True))
    assert found_after == after
    numpy.random.seed(0)            # whoever looks when
    check_equal(values(found), values(expected))
    numpy.random.seed(0)
    assert numpy.random.rand() == pytest.approx(0.5488135)


@pytest.mark.parametrize('name', [
    'HeUniform', 'Orthogonal', 'repeated', 'repeated copies', 'a deep copy'])
def test_nothing_is_kept_until_it_is_asked_for(name):
    model, _ = made(MODELS[name], Undrawn(lambda: True))
    assert all(is_placeholder(one._data[0]) for one in model.params()), name


def test_a_large_model_takes_no_memory(monkeypatch):
    monkeypatch.undo()
    tracemalloc.start()
    try:
        model, _ = made(lambda: L.Linear(3000, 3000).repeat(2),
                        Undrawn(lambda: True))
        assert tracemalloc.get_traced_memory()[1] < 3e6
        assert not is_placeholder(model[0].b._data[0])        # it is small
    finally:
        tracemalloc.stop()


def test_to_count_parameters_is_not_to_look_at_them():
    undrawn = Undrawn(lambda: True)
    model, _ = made(lambda: sequence(L.Linear(3, 2), L.Linear(None, 2)),
                    undrawn)
    with undrawn.building(), pytest.warns(UserWarning, match='W'):
        assert model.count_params() == 10
    with undrawn.building():
        assert len(list(model.params(include_uninit=False))) == 3
        assert len(dict(model.namedparams(False))) == 3
    assert is_placeholder(model[0].W._data[0])


def test_a_script_that_has_made_its_updater_builds_as_usual():
    model, _ = made(MODELS['layers'], Undrawn(lambda: False))
    assert not any(is_placeholder(one._data[0]) for one in model.params())


def test_what_is_not_of_the_model_is_drawn_before_it_is_traced():
    undrawn = Undrawn(lambda: True)
    model, _ = made(lambda: sequence(L.Linear(3, 2)), undrawn)
    teacher, _ = made(lambda: copy.deepcopy(L.Linear(3, 2)), undrawn)
    undrawn.draw_others(model)
    assert is_placeholder(model[0].W._data[0])
    assert not is_placeholder(teacher.W._data[0])


# --- load_npz ---------------------------------------------------------------

def lazy():
    return sequence(L.Linear(None, 4), L.BatchNormalization(4), L.Linear(4, 2))


def loaded(undrawn, path, model, **options):
    with undrawn.building(), undrawn.loading(path, model):
        chainer.serializers.load_npz(path, model, **options)


@pytest.fixture
def saved(tmp_path):
    numpy.random.seed(1)
    model = lazy()
    model(numpy.ones((3, 5), 'f'))
    chainer.serializers.save_npz(tmp_path / 'model.npz', model)
    return tmp_path / 'model.npz', model


@pytest.mark.parametrize(('options', 'kept'), [
    ({}, ()), ({'ignore_names': '2/W'}, ('/2/W',)),
    ({'strict': False}, ())])
def test_a_file_is_read_as_chainer_reads_it(saved, options, kept):
    path, model = saved
    undrawn = Undrawn(lambda: True)
    found, _ = made(lazy, undrawn)
    expected, _ = made(lazy, None)
    chainer.serializers.load_npz(path, expected, **options)
    loaded(undrawn, path, found, **options)
    assert is_placeholder(found[0].W._data[0])
    path.unlink()                   # as temporary files are
    check_equal(values(found), values(expected))
    numpy.testing.assert_array_equal(found[1].avg_mean, model[1].avg_mean)
    for name, value in values(found).items():
        assert numpy.array_equal(value, values(model)[name]) == (
            name not in kept)


@pytest.mark.parametrize('shape', [(3, 3), (4, 3)])
def test_a_file_of_another_shape_is_chainers_error(saved, shape):
    undrawn = Undrawn(lambda: True)
    found, _ = made(lambda: sequence(
        L.Linear(5, 4), L.BatchNormalization(4), L.Linear(*shape)), undrawn)
    with pytest.raises(ValueError, match='broadcast'):
        loaded(undrawn, saved[0], found)


def test_a_file_that_has_changed_since_is_named(saved):
    path, _ = saved
    undrawn = Undrawn(lambda: True)
    found, _ = made(lazy, undrawn)
    loaded(undrawn, path, found)
    chainer.serializers.save_npz(path, L.Linear(2, 2))
    with pytest.raises(ValueError, match=r'model\.npz has changed since'):
        _ = found[2].W.array


# --- what is said -----------------------------------------------------------

def test_a_model_that_every_rank_holds_is_said_with_its_first_reader(
        monkeypatch):
    undrawn = Undrawn(lambda: True)
    model, _ = made(lambda: L.Linear(40, 40), undrawn)
    monkeypatch.setattr(module, '_WORTH_A_WORD', 1000)
    assert undrawn.held(model) == ''
    _ = model.W.array
    assert 'test_undrawn.py:' in undrawn.held(model)
    assert "6.4 kB of the model's 6.56 kB" in undrawn.held(model)
    other, _ = made(lambda: L.Linear(40, 40, initialW=doubled),
                    Undrawn(lambda: True))
    assert 'an initializer of its own' in Undrawn(lambda: True).held(other)
