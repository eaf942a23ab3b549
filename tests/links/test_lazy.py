import functools
import pickle

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest


def test_the_repr_of_a_lazy_layer_shows_its_factory_and_arguments():
    assert repr(lazy(L.Linear, 3, 2, nobias=True)) == (
        'lazy(Linear, 3, 2, nobias=True)')
    assert repr(lazy(functools.partial(L.Linear, 3), 2)) == (
        'lazy(Linear, 2)')


@pytest.mark.parametrize(('factory', 'message'), [
    (5, 'a class or function that makes a layer, not 5'),
    (L.Linear(3, 2), 'Linear is a layer already'),
])
def test_lazy_refuses_a_factory_that_cannot_be_called(factory, message):
    with pytest.raises(TypeError, match=message):
        lazy(factory, 3)


@pytest.mark.parametrize(('factory', 'result'), [
    (lambda: 5, '5'), (lambda: None, 'None'),
    (lambda: lazy(L.Linear, 3), r'lazy\(Linear, 3\)')])
def test_a_factory_must_return_a_layer(factory, result):
    with pytest.raises(LayerError, match=(
            rf'layer 1 \(<lambda>\) cannot be built: .* returned {result}, '
            'which is not a layer')):
        Divisible(F.relu, lazy(factory))[1]


@pytest.mark.parametrize('dtype', [np.float16, np.float64, chainer.mixed16])
def test_the_dtype_is_that_where_the_model_was_written_down(dtype):
    with chainer.using_config('dtype', dtype):
        model = Divisible(lazy(L.BatchNormalization, 2), lazy(L.Linear, 2))
        eager = L.BatchNormalization(2)
    for one in (model, model.copy('copy'), pickle.loads(pickle.dumps(model))):
        assert one[0].avg_mean.dtype == eager.avg_mean.dtype
        assert one[0].gamma.dtype == eager.gamma.dtype
