import types

from chainer_fp8pipe.exchange.gradients import Gradients

import chainer
import chainer.functions as F
import numpy
import pytest

from ..communicators.helpers import Model, set_gradients


def test_float32_gradients_are_fused_without_a_copy():
    model = Model()
    set_gradients(model, 0)
    tensors = Gradients(model, zero_fill=False).tensors
    assert tensors.names == ('/p0', '/p1', '/p2', '/p3')
    for name, flat in zip(tensors.names, tensors.gradients, strict=True):
        gradient = dict(model.namedparams())[name].grad
        assert numpy.shares_memory(flat, gradient)


def test_other_gradients_are_brought_back():
    model = Model(shapes=((2, 3), (4,)), dtypes=('f2', 'f8'))
    set_gradients(model, 0)
    gradients = Gradients(model, zero_fill=False)
    for flat in gradients.tensors.gradients:
        flat[...] = 7
    gradients.write_back()
    for parameter in model.params():
        assert (parameter.grad == 7).all()


def test_the_loss_scale_is_the_parameters():
    model = Model()
    set_gradients(model, 0)
    assert Gradients(model, False).tensors.loss_scale == 1.0
    for parameter in model.params():
        parameter._loss_scale = 512.0
    assert Gradients(model, False).tensors.loss_scale == 512.0


def test_entries_describe_what_must_be_equal():
    model = Model(shapes=((2, 3), (4,)))
    with model.init_scope():
        model.lazy = chainer.Parameter(chainer.initializers.Zero())
    model.p0.grad = numpy.zeros((2, 3), 'f4')
    entries = Gradients(model, zero_fill=False).entries
    assert entries == {'the loss scale': 'None',
                       'parameter /lazy': 'not initialised',
                       'parameter /p0': 'float32 (2, 3)',
                       'parameter /p1': 'float32 (4,) without gradient'}


def test_filled_gradients_get_the_loss_scale_of_the_others():
    model = Model(shapes=((2,), (3,)))
    model.p0.grad = numpy.ones(2, 'f4')
    model.p0._loss_scale, model.p1._loss_scale = 64.0, 8.0      # an old one
    gradients = Gradients(model, zero_fill=True)
    assert gradients.loss_scale == gradients.tensors.loss_scale == 64.0
    assert model.p1._loss_scale == 64.0


def test_different_loss_scales_are_a_problem():
    model = Model(shapes=((2,), (3,)))
    set_gradients(model, 0)
    model.p0._loss_scale, model.p1._loss_scale = 64.0, 8.0
    assert '/p0 and /p1 have different loss scales, 64.0 and 8.0' in (
        Gradients(model, zero_fill=False).problem)


def test_a_finite_gradient_stays_finite_in_float16():
    model = Model(shapes=((4,),), dtypes=('f2',))
    set_gradients(model, 0)
    gradients = Gradients(model, zero_fill=False)
    gradients.tensors.gradients[0][...] = [7e4, -7e4, numpy.inf, numpy.nan]
    gradients.write_back()
    numpy.testing.assert_array_equal(
        model.p0.grad, [65504, -65504, numpy.inf, numpy.nan])


def test_a_gradient_that_is_a_view_to_read_is_replaced():
    model = Model(shapes=((4,),))
    F.sum(model.p0).backward()
    gradients = Gradients(model, zero_fill=False)
    gradients.tensors.gradients[0][...] = 3
    gradients.write_back()
    numpy.testing.assert_array_equal(model.p0.grad, [3, 3, 3, 3])


@pytest.mark.parametrize('dtype', ['i4', 'i8', '?', 'c8'])
def test_a_parameter_that_cannot_be_averaged_is_a_problem(dtype):
    model = chainer.Chain()
    with model.init_scope():
        model.count = chainer.Parameter(numpy.zeros(3, dtype))
    gradients = Gradients(model, zero_fill=False)
    assert 'parameter /count has dtype' in gradients.problem
    assert gradients.tensors is None


class GpuArray:
    """Stands for a CuPy array."""

    dtype = numpy.dtype('f4')
    shape = (3,)

    def __init__(self, device):
        self.device = types.SimpleNamespace(id=device)


def model_of(**parameters):
    """A model whose parameters are pairs of array and gradient."""
    return types.SimpleNamespace(namedparams=lambda: [
        (f'/{name}', types.SimpleNamespace(array=array, grad=gradient,
                                       _loss_scale=None))
        for name, (array, gradient) in parameters.items()])


@pytest.mark.parametrize(('first', 'second', 'message'), [
    (numpy.zeros(3, 'f4'), GpuArray(0),
     'the gradient of parameter /b is on GPU 0 but parameter /a is on the '
     'CPU; move the whole model'),
    (GpuArray(0), GpuArray(1),
     'the gradient of parameter /b is on GPU 1 but parameter /a is on GPU 0')])
def test_arrays_on_different_devices_are_a_problem(
        monkeypatch, first, second, message):
    monkeypatch.setattr(chainer.backends.cuda, 'ndarray', GpuArray)
    gradients = Gradients(
        model_of(a=(first, first), b=(first, second)), zero_fill=False)
    assert message in gradients.problem


def test_arrays_of_another_library_are_a_problem():
    other = types.SimpleNamespace(dtype=numpy.dtype('f4'), shape=(3,))
    gradients = Gradients(model_of(a=(other, other)), zero_fill=False)
    assert '/a is a types.SimpleNamespace; it must be a NumPy or a CuPy ' in (
        gradients.problem)


def test_gradients_that_are_one_array_are_brought_back_each_by_itself():
    model = Model(shapes=((4,), (4,)))
    model.p0.grad = model.p1.grad = numpy.ones(4, 'f4')
    gradients = Gradients(model, zero_fill=False)
    first, second = gradients.tensors.gradients
    first[...], second[...] = 2, 3
    gradients.write_back()
    numpy.testing.assert_array_equal(model.p0.grad, 2)
    numpy.testing.assert_array_equal(model.p1.grad, 3)


def test_a_part_has_those_of_the_wanted_parameters_that_have_a_gradient():
    model = Model(shapes=((2,), (3,), (0,), (5,)))
    set_gradients(model, 0)
    model.p1.grad = None
    gradients = Gradients(model, zero_fill=False)
    part = gradients.part(['/p3', '/p1', '/p0'])
    assert (part.names, part.size) == (('/p3', '/p0'), 7)
    assert numpy.shares_memory(part.gradients[0], model.p3.grad)
    assert gradients.sizes == {'/p0': 2, '/p1': 3, '/p3': 5}
