from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.exchange.model_state import ModelState

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
