import weakref

from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.exchange.model_state import ModelState, ModelStates

import chainer
import numpy
import pytest


def test_the_first_updates_are_float32_and_then_the_codecs():
    codec = Fp8Ratio()
    state = ModelState(codec, 2)
    seen = []
    for _ in range(4):
        seen.append(state.current.codec.wire_dtype.name)
        state.updates += 1
    assert seen == ['float32', 'float32', 'uint8', 'uint8']
    assert state.current.codec is codec


def test_without_warm_up_the_codec_comes_at_once():
    codec = Cast('float16')
    assert ModelState(codec).current.codec is codec


def test_state_brings_back_where_the_warm_up_was():
    first = ModelState(Fp8Ratio(), 5)
    first.updates = 4
    second = ModelState(Fp8Ratio(), 5)
    second.load_state(first.state())
    assert second.updates == 4
    assert second.current.codec.wire_dtype == numpy.float32


class Lender:
    """As much of an algorithm as lends memory for wires."""

    def __init__(self):
        self.lent = []

    def empty_wire(self, xp, size, dtype):
        self.lent.append((xp, size, numpy.dtype(dtype).name))
        return numpy.empty(size, dtype)


def test_a_wire_is_kept_while_it_fits():
    state, lender, device = ModelState(Cast('float16')), Lender(), object()
    fp8, half = Fp8Ratio(), Cast('float16')
    for bucket, codec, xp, size in [
            (0, half, numpy, 100), (0, half, numpy, 60), (1, half, numpy, 9),
            (0, half, numpy, 101), (0, fp8, numpy, 50), (0, fp8, device, 50),
            (0, fp8, device, 50)]:
        wire = state.wire(bucket, codec, xp, size, lender)
        assert wire.shape == (size,)
        assert wire.dtype == codec.wire_dtype
    assert lender.lent == [
        (numpy, 100, 'float16'), (numpy, 9, 'float16'),
        (numpy, 101, 'float16'), (numpy, 50, 'uint8'), (device, 50, 'uint8')]


def test_wires_of_all_models_are_given_up_together():
    states = ModelStates(lambda: ModelState(Cast('float32')))
    models, lender = [chainer.Link(), chainer.Link()], Lender()
    wires = [weakref.ref(states.of(model).wire(
        0, Cast('float32'), numpy, 50, lender).base) for model in models]
    assert all(wire() is not None for wire in wires)
    states.release()
    assert all(wire() is None for wire in wires)


def states_of(*models):
    states = ModelStates(lambda: ModelState(Fp8Ratio()))
    return states, [states.of(model) for model in models]


def test_a_models_state_is_its_own_and_goes_with_it():
    models = [chainer.Link() for _ in range(3)]
    states, found = states_of(*models)
    assert [state.number for state in found] == [0, 1, 2]
    assert [states.of(model) for model in models] == found
    gone = weakref.ref(found.pop(1))
    del models[1]
    assert gone() is None
    assert [*states] == found
    models.append(chainer.Link())
    assert states.known(models[-1]) is None
    assert states.of(models[-1]).number == 3
    assert [states.of(model) for model in models[:2]] == found


def test_a_model_that_is_equal_to_another_has_a_state_of_its_own():
    class Equal(chainer.Link):
        def __eq__(self, other):
            return isinstance(other, Equal)
    models = Equal(), Equal()
    _, found = states_of(*models)
    assert found[0] is not found[1]


def test_a_state_is_loaded_for_a_model_whatever_came_before():
    first, second = chainer.Link(), chainer.Link()
    states, (one, two) = states_of(first, second)
    one.updates, two.updates = 3, 5
    saved = two.state()
    again, _ = states_of(chainer.Link())
    again.load(second, saved)
    assert again.known(second).updates == 5
    assert again.known(first) is None
    assert again.of(second).number == 1     # averaged after another one


def test_a_state_that_is_none_changes_nothing():
    model = chainer.Link()
    states, (state,) = states_of(model)
    for damaged in {'codec|done': numpy.array(1)}, {
            **state.state(), 'codec|codec': numpy.array(1)}:
        with pytest.raises(ValueError, match='no state of'):
            states.load(model, damaged)
        assert states.known(model) is state
    states.load(model, {})      # of a model that was not averaged yet
    assert states.known(model) is not state
    assert states.of(model).number == 0
