import weakref

from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.exchange.model_state import ModelState, ModelStates

import chainer
import numpy


def test_the_first_updates_are_float32_and_then_the_codecs():
    codec = Fp8Ratio()
    state = ModelState(0, codec, 2)
    seen = []
    for _ in range(4):
        seen.append(state.current.wire_dtype.name)
        state.updates += 1
    assert seen == ['float32', 'float32', 'uint8', 'uint8']
    assert state.current is codec


def test_without_warm_up_the_codec_comes_at_once():
    codec = Cast('float16')
    assert ModelState(0, codec).current is codec


def test_state_brings_back_where_the_warm_up_was():
    first = ModelState(0, Fp8Ratio(), 5)
    first.updates = 4
    second = ModelState(0, Fp8Ratio(), 5)
    second.load_state(first.state())
    assert second.updates == 4
    assert second.current.wire_dtype == numpy.float32


class Lender:
    """As much of an algorithm as lends memory for wires."""

    def __init__(self):
        self.lent = []

    def empty_wire(self, xp, size, dtype):
        self.lent.append((xp, size, numpy.dtype(dtype).name))
        return numpy.empty(size, dtype)


def test_a_wire_is_kept_while_it_fits():
    state, lender, device = ModelState(0, Cast('float16')), Lender(), object()
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
    states = ModelStates(lambda number: ModelState(number, Cast('float32')))
    models, lender = [chainer.Link(), chainer.Link()], Lender()
    wires = [weakref.ref(states.of(model).wire(
        0, Cast('float32'), numpy, 50, lender).base) for model in models]
    assert all(wire() is not None for wire in wires)
    states.release()
    assert all(wire() is None for wire in wires)
