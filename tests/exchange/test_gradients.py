"""A model's gradients as flat arrays, and what forbids to average them."""
import types

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.exchange.gradients import Gradients

import chainer
import chainer.functions as F
import numpy
import pytest

from tests.ranks import on_ranks

from ..communicators.helpers import Model, set_gradients


def test_what_is_float32_is_exchanged_where_it_lies():
    model = Model(shapes=((2,), (3,), (0,), (5, 2)))
    set_gradients(model, 0)
    model.p1.grad = None
    gradients = Gradients(model, zero_fill=False)
    assert gradients.sizes == {'/p0': 2, '/p1': 3, '/p3': 10}
    assert {name: (flat.shape, gradients.values[name].shape)
            for name, flat in gradients.flat.items()} == {
        '/p0': ((2,), (2,)), '/p2': ((0,), (0,)), '/p3': ((10,), (10,))}
    assert numpy.shares_memory(gradients.flat['/p3'], model.p3.grad)
    assert numpy.shares_memory(gradients.values['/p3'], model.p3.array)


def test_what_is_finite_stays_finite_in_float16():
    model = Model(shapes=((4,),), dtypes=('f2',))
    set_gradients(model, 0)
    gradients = Gradients(model, zero_fill=False)
    assert gradients.flat['/p0'].dtype == numpy.float32
    gradients.flat['/p0'][...] = 7e4, -7e4, numpy.inf, numpy.nan
    gradients.write_back(gradients.arrays)
    numpy.testing.assert_array_equal(
        model.p0.grad, [65504, -65504, numpy.inf, numpy.nan])


def its_own_array(model):
    model.p0.grad = model.p0.array


def anothers_array(model):
    model.p0.grad = model.p1.array
    model.p1.grad = numpy.ones(40, 'f4')


def a_part_of_it(model):
    model.p0.array = (whole := numpy.ones(50, 'f4'))[:40]
    model.p0.grad = whole[10:]


def every_second_of_it(model):
    model.p0.array = (whole := numpy.ones(80, 'f4'))[::2]
    model.p0.grad = whole[:40]


def a_broadcast(model):
    F.sum(model.p0).backward()      # a view of one number


def one_for_two(model):
    model.p0.grad = model.p1.grad = numpy.ones(40, 'f4')


def read_only(model):
    model.p0.grad = numpy.ones(40, 'f4')
    model.p0.grad.flags.writeable = False


@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('name', ['fp8', 'int4', 'float32'])
@on_ranks(2)
def test_gradients_in_shared_memory_leave_parameters_alone(
        comm, name, overlap):
    for share in (its_own_array, anothers_array, a_part_of_it,
                  every_second_of_it, a_broadcast, one_for_two, read_only):
        communicator = create_communicator(
            name, comm, overlap=overlap,
            **({} if name == 'float32' else {'warmup': 0}))
        model = Model(shapes=((40,), (40,)))
        share(model)
        before = [one.array.copy() for one in model.params()]
        expected = [None if one.grad is None else comm.allreduce(
            one.grad.astype('f8')) / 2 for one in model.params()]
        communicator.multi_node_mean_grad(model)
        for parameter, array, mean in zip(
                model.params(), before, expected, strict=True):
            numpy.testing.assert_array_equal(parameter.array, array)
            if mean is not None:
                numpy.testing.assert_allclose(
                    parameter.grad, mean, atol=abs(mean).max() / 7)
        communicator.finalize()


def test_filled_gradients_get_the_loss_scale_of_the_others():
    model = Model(shapes=((2,), (3,)))
    set_gradients(model, 0)
    assert Gradients(model, zero_fill=False).loss_scale is None
    model.p1.grad = None
    model.p0._loss_scale, model.p1._loss_scale = 64.0, 8.0      # an old one
    assert Gradients(model, zero_fill=True).loss_scale == 64.0
    assert model.p1._loss_scale == 64.0


class GpuArray:
    """Stands for a CuPy array."""

    dtype, shape, size = numpy.dtype('f4'), (3,), 3

    def __init__(self, device):
        self.device = types.SimpleNamespace(id=device)


def of(array, gradient=None, scale=None):
    return types.SimpleNamespace(array=array, grad=gradient,
                                 _loss_scale=scale)


F4, OTHER = numpy.zeros(3, 'f4'), types.SimpleNamespace(
    dtype=numpy.dtype('f4'), shape=(3,), size=3)


@pytest.mark.parametrize(('first', 'second', 'problem'), [
    (of(F4, F4, 64.0), of(F4, F4, 8.0),
     '/a and /b have different loss scales, 64.0 and 8.0'),
    (of(F4, F4), of(F4, GpuArray(0)),
     'the gradient of parameter /b is on GPU 0 but parameter /a is on the '
     'CPU; move the whole model'),
    (of(GpuArray(0), GpuArray(0)), of(GpuArray(0), GpuArray(1)),
     'the gradient of parameter /b is on GPU 1 but parameter /a is on GPU 0'),
    (of(F4), of(OTHER, OTHER),
     '/b is a types.SimpleNamespace; it must be a NumPy or a CuPy '),
    *((of(F4), of(numpy.zeros(3, dtype)), 'parameter /b has dtype')
      for dtype in ('i4', 'i8', '?', 'c8'))])
def test_what_cannot_be_averaged_is_a_problem(
        monkeypatch, first, second, problem):
    monkeypatch.setattr(chainer.backends.cuda, 'ndarray', GpuArray)
    model = types.SimpleNamespace(
        namedparams=lambda: [('/a', first), ('/b', second)])
    assert problem in Gradients(model, zero_fill=False).problem
