"""Parameters that are drawn when somebody looks, and only there."""
import copy
import tracemalloc

from chainer_fp8pipe import deferred
from chainer_fp8pipe.chains.placeholder import is_placeholder

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(2, 3, 3)
            self.norm = L.BatchNormalization(3)
            self.lazy = L.Linear(None, 5)
            self.cells = L.Linear(5, 5).repeat(2)
            self.out = L.EmbedID(4, 5, chainer.initializers.Normal(2))
            self.free = chainer.Parameter(chainer.initializers.Uniform(3),
                                          (2, 2))
            self.scalar = chainer.Parameter(.5, (3,))

    def forward(self, x):
        return self.lazy(self.norm(self.conv(x)))


X = numpy.ones((2, 2, 4, 4), 'f')


def values(model):
    return {name: parameter.array.copy()
            for name, parameter in model.namedparams()
            if parameter.array is not None}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        numpy.testing.assert_array_equal(value, expected[name], name)


def made(seed=0):
    with deferred(seed):
        return Net()


def test_a_large_model_takes_no_memory_until_it_is_used():
    tracemalloc.start()
    try:
        with deferred():
            model = chainer.Sequential(*(
                L.Linear(3000, 3000) for _ in range(3)))
        assert sum(p.size for p in model.params()) == 3 * 3000 * 3001
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        model[1].W.array[0, 0] = 3
        assert 36e6 < tracemalloc.get_traced_memory()[0] < 37e6
    finally:
        tracemalloc.stop()


def test_values_do_not_depend_on_who_looks_when():
    first, second = made(), made()
    expected = values(first)
    numpy.random.seed(7)
    for _, parameter in reversed(list(second.namedparams())):
        numpy.random.rand(3)
        assert (parameter.array is None) == (not parameter.is_initialized)
    same(values(second), expected)
    assert any(numpy.any(value != expected[name])
               for name, value in values(made(1)).items())


def test_each_parameter_is_drawn_by_its_own_initializer():
    model = made()
    assert model.scalar.array.tolist() == [.5] * 3
    assert model.norm.gamma.array.tolist() == [1] * 3
    assert abs(model.free.array).max() <= 3
    assert not numpy.array_equal(model.cells[0].W.array,
                                 model.cells[1].W.array)
    assert model.conv.b.array.tolist() == [0] * 3


def test_a_link_that_finds_its_shape_in_forward_is_drawn_alike():
    first, second = made(), made()
    first(X)
    second.free.array[...] = 0          # drawn before; that one after
    second(X)
    numpy.testing.assert_array_equal(first.lazy.W.array, second.lazy.W.array)
    assert first.lazy.W.shape == (5, 12)
    assert numpy.std(first.lazy.W.array) > .1


def test_the_generator_of_numpy_stays_as_it_is():
    numpy.random.seed(3)
    expected = numpy.random.rand(4)
    numpy.random.seed(3)
    model = made()
    _ = model.conv.W.array
    numpy.testing.assert_array_equal(numpy.random.rand(4), expected)


def test_what_a_constructor_draws_itself_is_seeded():
    class Projection(chainer.Link):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.W = chainer.Parameter(numpy.random.rand(3))
    found = []
    for state in (1, 2):
        numpy.random.seed(state)
        with deferred(5):
            found.append(Projection().W.array)
    numpy.testing.assert_array_equal(*found)


def test_a_deferred_model_trains_as_one_with_these_values(tmp_path):
    model, other = made(), Net()
    other(X)
    with chainer.using_config('train', False):
        model(X)
    chainer.serializers.save_npz(tmp_path / 'model.npz', model)
    chainer.serializers.load_npz(tmp_path / 'model.npz', other)
    model = made()
    for one in (model, other):
        one.norm.avg_mean[...], one.norm.avg_var[...] = 0, 1
    optimizers = [chainer.optimizers.Adam().setup(one)
                  for one in (model, other)]
    for optimizer in optimizers:
        for _ in range(3):
            optimizer.update(lambda one: F.sum(one(X) ** 2),
                             optimizer.target)
    same(values(model), values(other))


@pytest.mark.parametrize('mode', ['init', 'copy', 'share'])
def test_repeated_links_are_alike_as_their_mode_says(mode):
    with deferred():
        first, second = L.Linear(3, 4).repeat(2, mode)
    assert numpy.array_equal(first.W.array, second.W.array) == (
        mode != 'init')
    first.W.array[...] = 0
    assert (not second.W.array.any()) == (mode == 'share')


@pytest.mark.parametrize('make', [copy.deepcopy, lambda link: link.copy()])
def test_a_copy_made_outside_has_the_same_values(make):
    with deferred():
        link = L.Linear(3, 4)
    other = make(link)
    numpy.testing.assert_array_equal(other.W.array, link.W.array)
    assert other.W is not link.W


def test_gradients_and_updates_find_values():
    with deferred():
        link = L.Linear(3, 1, initialW=2)
    assert is_placeholder(link.W._data[0])
    link.cleargrads()
    link(numpy.ones((1, 3), 'f')).backward()
    assert link.W.array.tolist() == [[2, 2, 2]]
    assert link.W.grad.tolist() == [[1, 1, 1]]
    assert type(link.W) is chainer.Parameter


def test_a_dtype_is_that_of_the_time_when_it_was_made():
    with chainer.using_config('dtype', numpy.float16), deferred():
        link = L.Linear(3, 2)
    assert link.W.dtype == link.W.array.dtype == numpy.float16


def test_a_model_with_values_is_none_of_its_business():
    with deferred():
        link = L.Linear(2, 2, initialW=numpy.eye(2, dtype='f'))
        parameter = chainer.Parameter(numpy.arange(3.))
    assert link.W.array.tolist() == [[1, 0], [0, 1]]
    assert parameter.array.tolist() == [0, 1, 2]
    assert not is_placeholder(parameter._data[0])


def test_nested_blocks_and_errors_leave_chainer_as_it_was():
    def patched():
        return chainer.Parameter.__init__, chainer.Parameter.initialize
    before = patched()
    with pytest.raises(KeyError), deferred(), deferred(1):
        raise KeyError
    assert patched() == before
    assert not is_placeholder(L.Linear(2, 2).W._data[0])


@on_ranks(3)
def test_all_ranks_draw_the_same(comm):
    numpy.random.seed(comm.rank)
    model = made(11)
    names = [name for name, parameter in model.namedparams()
             if parameter.is_initialized]
    found = dict(model.namedparams())
    drawn = {name: found[name].array for name in names[comm.rank:]}
    for other in comm.allgather(drawn):
        for name in set(drawn) & set(other):
            numpy.testing.assert_array_equal(drawn[name], other[name])
