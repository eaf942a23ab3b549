from chainer_fp8pipe import lazy
from chainer_fp8pipe.links import Divisible
from chainer_fp8pipe.training.hooks import LARS, is_weight

import chainer
import chainer.links as L
import numpy
from chainermn.links import MultiNodeBatchNormalization


def names_of_weights(link):
    return [name for name, parameter in sorted(link.namedparams())
            if is_weight(parameter)]


def test_weights_are_told_from_the_rest_in_chainers_links():
    model = chainer.Chain(
        linear=L.Linear(3, 2), convolution=L.Convolution2D(1, 2, 3),
        embedding=L.EmbedID(3, 2), lstm=L.LSTM(2, 2),
        batch=L.BatchNormalization(2), again=L.BatchRenormalization(2),
        layer=L.LayerNormalization(2), group=L.GroupNormalization(1, 2),
        slope=L.PReLU(), bias=L.Bias(1, (2, 3)), scale=L.Scale(1, (2,)))
    assert names_of_weights(model) == [
        '/convolution/W', '/embedding/W', '/linear/W', '/lstm/lateral/W',
        '/lstm/upward/W']


def test_parameters_of_normalisations_may_have_several_dimensions():
    model = chainer.Sequential(
        L.BatchNormalization(axis=0, size=(2, 3)),
        L.LocalConvolution2D(1, 2, in_size=4, ksize=3))
    assert model[0].gamma.ndim == 2
    assert model[1].b.ndim == 3
    assert names_of_weights(model) == ['/1/W']


def test_parameters_of_chainermns_normalisation_are_no_weights():
    link = MultiNodeBatchNormalization((2, 3), _Alone())
    assert names_of_weights(link) == []


class _Alone:
    size = 1


def test_parameters_that_get_their_shape_late_are_judged_then():
    model = chainer.Sequential(L.Linear(None, 2))
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    optimizer.add_hook(LARS(0.01))
    model.cleargrads()
    optimizer.update()
    for _ in range(2):
        y = model(numpy.ones((1, 3), 'f4'))
        before = model[0].W.array.copy()
        model.cleargrads()
        y.grad = numpy.ones_like(y.array)
        y.backward()
        optimizer.update()
        change = numpy.linalg.norm(model[0].W.array - before)
        numpy.testing.assert_allclose(
            change, 0.01 * numpy.linalg.norm(before), rtol=1e-5)


def test_layers_that_are_built_late_are_weights_too():
    model = Divisible(lazy(L.Linear, 3, 2), lazy(L.BatchNormalization, 2))
    assert names_of_weights(model.divide(0, 2)) == ['/0/W']
