"""What a placeholder tells, what is recorded of it, and what it refuses."""
import copy
import inspect
import math
import pickle
import tracemalloc
import types

from chainer_fp8pipe.chains.attributes import Names
from chainer_fp8pipe.chains.layout import Layout
from chainer_fp8pipe.chains.placeholder import (
    PlaceholderError,
    is_placeholder,
    placeholder,
)
from chainer_fp8pipe.chains.recorder import Recorder
from chainer_fp8pipe.pipeline.means import BatchStatistics

import chainer
import numpy as np
import pytest

#: What code between Chainer's functions does with arrays.
OPERATIONS = {
    'plus': lambda a, b: a + b, 'number minus': lambda a, b: 2 - a,
    'times array': lambda a, b: np.float32(3) * a, 'minus': lambda a, b: -a,
    'and': lambda a, b: (a > 0) & ~(b == 0),
    'matmul': lambda a, b: abs(a) @ b.T,
    'maximum': lambda a, b: np.maximum(a, b),
    'reduce': lambda a, b: np.add.reduce(a, axis=1),
    'outer': lambda a, b: np.multiply.outer(a, b),
    'accumulate': lambda a, b: np.add.accumulate(a, axis=1),
    'sum': lambda a, b: a.sum(), 'sum of an axis': lambda a, b: a.sum(axis=1),
    'mean': lambda a, b: a.mean(axis=0, keepdims=True),
    'argmax': lambda a, b: a.argmax(axis=1), 'any': lambda a, b: a.any(),
    'cast': lambda a, b: a.astype('i'), 'T': lambda a, b: a.T,
    'reshape': lambda a, b: a.reshape(2, -1),
    'transpose': lambda a, b: a.transpose(1, 0),
    'take': lambda a, b: a.take([0, 2], axis=0),
    'row': lambda a, b: a[1], 'slice': lambda a, b: a[1:, ::2],
    'element': lambda a, b: a[1, 2], 'new axis': lambda a, b: a[:, None],
    'index array': lambda a, b: a[np.array([1, 1]), np.array([0, 3])],
    'index of a placeholder': lambda a, b: a[b.argmax(axis=0)],
    'where': lambda a, b: np.where(a > 0, a, b),
    'concatenate': lambda a, b: np.concatenate([a, b, a]),
    'np.mean': lambda a, b: np.mean(a),
    'einsum': lambda a, b: np.einsum('ij,kj->ik', a, b),
    'norm': lambda a, b: np.linalg.norm(a, axis=1),
    'variable': lambda a, b: chainer.Variable(a).array * b,
    'imag': lambda a, b: a.imag,
    'repeat each': lambda a, b: np.repeat(a, [1, 2, 1], axis=0),
    'along an axis': lambda a, b: np.take_along_axis(
        a, b.argsort(axis=1), axis=1),
    'full like': lambda a, b: np.full_like(a, b.max())}


class Net(chainer.Chain):
    """Does something with the arrays of two parameters."""

    def __init__(self, operation):
        super().__init__()
        random, self.operation = np.random.RandomState(0), operation
        with self.init_scope():
            self.a, self.b = (chainer.Parameter(
                random.randn(3, 4).astype('f')) for _ in range(2))

    def forward(self):
        found = self.operation(self.a.array, self.b.array)
        return np.reshape(found, np.shape(found) or 1)     # no number


def recorded(net):
    recorder = Recorder(Names(net))
    with recorder.placeholders():
        return recorder.record(net)


@pytest.mark.parametrize('name', OPERATIONS)
def test_numpy_on_placeholders_is_numpy_on_the_values_later(name):
    net = Net(OPERATIONS[name])
    expected, program = net(), recorded(net)
    program.settle(Layout(program, (), ()), [0])
    found, = program.run(0, (), '', BatchStatistics())[1]
    assert is_placeholder(program.result)
    assert (program.result.shape, program.result.dtype) == (
        found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


def test_a_placeholder_says_what_it_is_without_its_data():
    tracemalloc.start()
    try:
        array = placeholder((10_000, 10_000), 'f', 'x')
        assert array.nbytes == 400_000_000
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    array = placeholder((3, 4), 'f', 'x')
    assert isinstance(array, np.ndarray)
    assert isinstance(array, chainer.get_array_types())
    assert (array.shape, array.ndim, array.size, len(array)) == (
        (3, 4), 2, 12, 3)
    assert (np.shape(array), np.ndim(array), np.size(array)) == ((3, 4), 2,
                                                                 12)
    assert chainer.backend.get_array_module(array) is np
    assert 'float32 (3, 4)' in f'{array} {array!r}'
    np.testing.assert_array_equal(np.ones_like(array, 'i'),
                                  np.ones((3, 4), 'i'))
    assert chainer.Variable(array).shape == (3, 4)


def _set_item(a):
    a[0] = 1


def _add_in_place(a):
    a += 1


def _walk(a):
    for _ in a:
        pass


def _set_shape(a):
    a.shape = (4, 3)


def _set_real(a):
    a.real = 0


LOOKS = {
    'float': lambda a: float(a[0, 0]), 'int': lambda a: int(a.sum()),
    'bool': lambda a: bool(a.any()), 'if': lambda a: 1 if a[0, 0] > 0 else 2,
    'item': lambda a: a.max().item(), 'in': lambda a: 1 in a,
    'range': lambda a: range(a.astype('i')[0, 0]),
    'condition': lambda a: a[a > 0],
    'condition of others': lambda a: a[np.zeros((3, 4), bool)],
    'set item': _set_item, 'in place': _add_in_place, 'iteration': _walk,
    'np.nonzero': lambda a: np.nonzero(a),
    'array_equal': lambda a: bool(np.array_equal(a, a)),
    'copyto': lambda a: np.copyto(a, 0), 'put': lambda a: np.put(a, 0, 1),
    'out': lambda a: np.add(a, 1, out=np.zeros((3, 4), 'f')),
    'out is a placeholder': lambda a: np.add(np.zeros((3, 4), 'f'), 1, out=a),
    'at': lambda a: np.add.at(a, 0, 1), 'pickle': lambda a: pickle.dumps(a),
    'deepcopy': lambda a: copy.deepcopy(a), 'base': lambda a: a.base,
    'shape =': _set_shape, 'real =': _set_real,
    'out by position': lambda a: np.clip(a, 0, 1, np.zeros((3, 4), 'f')),
    'out of dot by position': lambda a: np.dot(a, a.T, np.zeros((3, 3), 'f')),
    'place': lambda a: np.place(np.zeros((3, 4), 'f'), a > 0, [1]),
    'save': lambda a: np.save('x', a),
    'compress': lambda a: np.compress(a[0] > 0, np.ones(4)),
    'bincount': lambda a: np.bincount(a.argmax(axis=1)),
    'as often as': lambda a: np.repeat(a[:, 0], a.argmax(axis=1)),
    'tile': lambda a: np.tile(a, a.argmax()),
    'array': lambda a: np.array(a, 'd'),
    'buffer': lambda a: np.zeros((3, 4), 'f').__setitem__(..., a),
    'index': lambda a: np.ones(4)[a.argmax(axis=1)],
    'conditions': lambda a: np.ones(3)[a[:, 0] > 0],
    'number': lambda a: np.float64(a.mean()),
    'delete some': lambda a: np.delete(a[0], a.argmax(axis=1)),
    'math': lambda a: math.exp(a.mean())}


@pytest.mark.parametrize('name', LOOKS)
def test_a_look_at_the_data_names_the_users_line(name):
    look = LOOKS[name]
    _, first = inspect.getsourcelines(look)
    with pytest.raises(PlaceholderError, match='atomic') as caught:
        recorded(Net(lambda a, b: look(a)))
    place, _, said = str(caught.value).partition(': ')
    path, _, line = place.rpartition(':')
    assert path == __file__
    assert first <= int(line) <= first + 2
    assert said


def test_a_parameter_of_another_rank_is_for_the_updater():
    """Nothing is traced where a script calls a part of a divided model."""
    with pytest.raises(PlaceholderError,
                       match=r'/l/W.*evaluate\(\) or predict'):
        np.dot(np.ones(3, 'f'), placeholder((3, 4), 'f', '/l/W'),
               out=np.ones(4))


def test_made_up_values_are_written_nowhere():
    """The shapes of results are found out with them."""
    found = np.zeros((3, 3), 'f')
    for write in (lambda a, b: np.dot(a, a.T, out=found),
                  lambda a, b: np.dot(a, a.T, found),
                  lambda a, b: np.cumsum(a[:, :3], 0, None, found),
                  lambda a, b: np.place(found, a[:, :3] > -1, [1]),
                  lambda a, b: np.put_along_axis(
                      found, a.argsort(1)[:, :1], 1, 1)):
        with pytest.raises(PlaceholderError):
            recorded(Net(write))
    assert not found.any()
    recorded(Net(lambda a, b: np.concatenate([a[:, :3], found], out=None)))


class DeviceArray:
    """Never made: a placeholder takes no memory of the device."""

    def __init__(self, *_):
        raise AssertionError('made on the device')


device = types.SimpleNamespace(
    ndarray=DeviceArray, cuda=types.SimpleNamespace(Device=lambda: 'gpu'))


@pytest.mark.parametrize('look', [
    bool, float, lambda array: array.get(), lambda array: array.item(),
    lambda array: array.data, list])
def test_a_placeholder_of_a_device_is_like_the_arrays_there(look):
    """With a stand-in for CuPy."""
    made = placeholder((1,), 'f', 'x', device)
    assert isinstance(made, DeviceArray)
    assert not isinstance(made, np.ndarray)
    assert is_placeholder(made)
    assert (made.shape, made.dtype, made.device) == ((1,), np.float32, 'gpu')
    with pytest.raises(PlaceholderError, match='test_placeholder.py:'):
        look(made)
