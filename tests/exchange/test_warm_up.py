from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.exchange.model_state import WarmUp

import numpy


def test_the_first_updates_are_float32_and_then_the_codecs():
    codec = Fp8Ratio()
    warm_up = WarmUp(codec, 2)
    seen = []
    for _ in range(4):
        seen.append(warm_up.current.wire_dtype.name)
        warm_up.done += 1
    assert seen == ['float32', 'float32', 'uint8', 'uint8']
    assert warm_up.current is codec


def test_without_warm_up_the_codec_comes_at_once():
    codec = Cast('float16')
    assert WarmUp(codec, 0).current is codec


def test_state_brings_back_where_the_warm_up_was():
    first = WarmUp(Fp8Ratio(), 5)
    first.done = 4
    second = WarmUp(Fp8Ratio(), 5)
    second.load_state(first.state())
    assert second.done == 4
    assert second.current.wire_dtype == numpy.float32
