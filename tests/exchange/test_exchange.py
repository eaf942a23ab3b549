"""What is remembered of a model, and for how long."""
import weakref

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import Fp8Ratio

import chainer
import numpy
import pytest

from tests.ranks import on_ranks

from ..communicators.helpers import Model, set_gradients
from .jobs import exchange_of


@pytest.mark.parametrize('change', [
    lambda saved: {'codec|done': numpy.array(1)},
    lambda saved: {**saved, 'codec|codec': numpy.array(1)}])
def test_a_state_that_is_none_changes_nothing(change):
    exchange = exchange_of(Fp8Ratio())
    exchange.updates, state = 7, exchange.state
    with pytest.raises(ValueError, match='no state of'):
        exchange.load(change(exchange.save()))
    assert (exchange.updates, exchange.state) == (7, state)
    exchange.load({})           # of a model that was not averaged yet
    assert exchange.updates == 0
    assert exchange.state is not state


def average(communicator, model):
    set_gradients(model, 0)
    communicator.multi_node_mean_grad(model)
    return communicator._known(model)


@on_ranks(1)
def test_a_models_exchange_is_its_own_and_goes_with_it(comm):
    class Equal(Model):
        def __eq__(self, other):
            return isinstance(other, Equal)
    communicator = create_communicator('fp8', comm)
    models = [Equal() for _ in range(3)]
    first, gone, last = found = [
        average(communicator, model) for model in models]
    assert [one.number for one in found] == [0, 1, 2]
    found, gone = None, weakref.ref(gone)
    del models[1]
    assert gone() is None
    models.append(Model())
    assert communicator._known(models[-1]) is None
    found = [average(communicator, model) for model in models]
    assert found[:2] == [first, last] == [
        *communicator._setup.exchanges.values()][:2]
    assert found[2].number == 3
    communicator.finalize()


@on_ranks(1)
def test_a_state_is_loaded_for_a_model_whatever_came_before(comm):
    first, second = Model(), Model()
    communicator = create_communicator('fp8', comm)
    for model, times in (first, 3), (second, 5):
        for _ in range(times):
            average(communicator, model)
    saved = communicator.state(second)
    again = create_communicator('fp8', comm)
    average(again, other := Model())
    again.load_state(saved, second)
    assert again._known(second).updates == 5
    assert again._known(first) is None
    assert average(again, second).number == 1
    assert average(again, other).number == 0
    for one in communicator, again:
        one.finalize()
    with pytest.raises(RuntimeError, match='has been finalized'):
        again.multi_node_mean_grad(chainer.Link())
