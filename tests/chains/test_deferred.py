"""Parameters that are drawn when somebody looks, with NumPy's values."""
import contextlib
import copy
import pickle
import tracemalloc

from chainer_fp8pipe import deferred
from chainer_fp8pipe.chains import deferred as module
from chainer_fp8pipe.chains.placeholder import is_placeholder

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from chainer import initializers


@pytest.fixture(autouse=True)
def every_parameter_is_large(monkeypatch):
    monkeypatch.setattr(module, '_SMALL', 0)


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(2, 3, 3)
            self.norm = L.BatchNormalization(3)
            self.lazy = L.Linear(None, 5)
            self.lazier = L.Linear(None, 5)
            self.cells = L.Linear(5, 5).repeat(2)
            self.out = L.EmbedID(4, 5, initializers.Normal(2))
            self.scalar = chainer.Parameter(.5, (3,))

    def forward(self, x):
        return self.lazier(self.lazy(self.norm(self.conv(x))))


X = numpy.ones((2, 2, 4, 4), 'f')


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


class Projection(chainer.Link):
    """Draws itself."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.W = chainer.Parameter(numpy.random.rand(3))


def doubled(array):
    array[...] = numpy.random.rand(*array.shape) * 2


def in_half_precision():
    with chainer.using_config('dtype', numpy.float16):
        return L.Linear(5, 3)


#: By name, what makes a model with a parameter that has no values yet.
MODELS = {
    'layers': lambda: chainer.Sequential(
        L.Linear(7, 5), L.Convolution2D(2, 3, 3), L.BatchNormalization(4),
        L.EmbedID(5, 3), L.LSTM(3, 4)),
    **{kind.__name__: lambda kind=kind: L.Linear(7, 3, initialW=kind())
       for kind in (
           initializers.Normal, initializers.LeCunNormal,
           initializers.Uniform, initializers.HeUniform,
           initializers.Orthogonal)},
    'repeated': lambda: L.Linear(4, 4).repeat(3),
    'shared': lambda: L.Linear(4, 4).repeat(3, mode='share'),
    'a vector': Vector,
    'an array': lambda: L.Linear(3, 2, initialW=numpy.ones((2, 3), 'f')),
    'half precision': in_half_precision,
    'moved to the CPU': lambda: chainer.Sequential(L.Linear(3, 3)).to_cpu(),
}
WITH_VALUES = {
    "an initializer of one's own": lambda: L.Linear(
        3, 2, nobias=True, initialW=doubled),
    'a generator of its own': lambda: L.Linear(
        3, 2, nobias=True,
        initialW=initializers.Normal(rng=numpy.random.RandomState(3))),
    'a deep copy': lambda: copy.deepcopy(L.Linear(4, 4, nobias=True)),
    'pickled': lambda: pickle.loads(pickle.dumps(L.Linear(4, 4, nobias=True))),
    'read while it is built': Rewritten,
    'drawn by the link': Projection,
}


def made(make, block=contextlib.nullcontext):
    """The model, and what the generator gives after it was made."""
    numpy.random.seed(5)
    with block():
        model = make()
        return model, numpy.random.rand(3).tolist()


def values(model):
    return {name: parameter.array.copy()
            for name, parameter in model.namedparams()
            if parameter.array is not None}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        numpy.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize('name', [*MODELS, *WITH_VALUES])
def test_values_and_the_generator_are_those_of_one_process(name):
    make = {**MODELS, **WITH_VALUES}[name]
    expected, after = made(make)
    found, found_after = made(make, lambda: deferred(5))
    assert found_after == after
    assert any(is_placeholder(one._data[0]) for one in found.params()) == (
        name in MODELS)
    numpy.random.seed(0)            # whoever looks when
    for _, parameter in reversed(list(found.namedparams())):
        _ = parameter.array
    same(values(found), values(expected))
    numpy.random.seed(0)
    assert numpy.random.rand() == pytest.approx(0.5488135)


def test_a_large_model_takes_no_memory_until_it_is_used(monkeypatch):
    monkeypatch.undo()
    tracemalloc.start()
    try:
        with deferred():
            model = chainer.Sequential(*(
                L.Linear(3000, 3000) for _ in range(3)))
        assert sum(p.size for p in model.params()) == 3 * 3000 * 3001
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
        assert not is_placeholder(model[0].b._data[0])      # it is small
        model[1].W.array[0, 0] = 3
        assert 36e6 < tracemalloc.get_traced_memory()[0] < 37e6
    finally:
        tracemalloc.stop()


def test_a_deferred_model_trains_as_one_with_these_values():
    numpy.random.seed(5)
    other = Net()
    with deferred(5):
        model = Net()
    for one in (model, other):
        optimizer = chainer.optimizers.Adam().setup(one)
        numpy.random.seed(6)        # for shapes that come in forward
        for _ in range(3):
            optimizer.update(lambda one: F.sum(one(X) ** 2), one)
    same(values(model), values(other))
    assert type(model.conv.W) is chainer.Parameter


@pytest.mark.parametrize('make', [copy.deepcopy, lambda link: link.copy()])
def test_a_copy_made_outside_has_the_same_values(make):
    with deferred():
        link = L.Linear(3, 4)
    other = make(link)
    numpy.testing.assert_array_equal(other.W.array, link.W.array)
    assert other.W is not link.W
