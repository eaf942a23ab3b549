"""The compiled loops: all generations of a processor, and many threads."""
import concurrent.futures

from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import _formats as _loops

import numpy as np
import pytest

from . import compilers, reference

#: Chunks without infinity and NaN go through loops of their own.
VALUES = {
    'any': np.concatenate([
        reference.interesting_floats(), reference.random_bits(70_001)]),
    'finite': reference.random_in_range(70_001),
}


def results(loops, values):
    """The bits of every operation in every rounding, on odd lengths."""
    other = values[::-1].copy()
    n = values.size
    bits = []
    for rounding in range(3):
        codes, total = np.zeros((2, n), np.uint8)
        loops.encode(values, codes, rounding, 1, 2)
        loops.add(codes, codes[::-1].copy(), total, rounding, 3, 4)
        bits += [codes, total]
        residual = other.copy()
        for feedback, bound in ((None, 0.0), (residual, np.inf),
                                (residual, 3.5)):
            out = np.zeros(n, np.uint8)
            counts = loops.ratio_encode(
                values, other, out, feedback, 3.0, 1 / 3, 1e-5, bound,
                rounding, 5, 6)
            bits += [out, np.array(counts)]
        bits.append(residual.view(np.uint32))
    decoded, total, ratios = np.zeros((3, n), np.float32)
    loops.decode(codes, decoded)
    loops.accumulate(codes, total)
    for wire in (codes, values):
        counts = loops.ratio_decode(wire, other, ratios, 0.5, 1e-5)
        bits += [ratios.view(np.uint32).copy(), np.array(counts)]
    return [*bits, decoded.view(np.uint32), total.view(np.uint32)]


@pytest.mark.parametrize('generation', compilers.GENERATIONS)
def test_every_generation_of_processors_gives_the_same_bits(
        generation, tmp_path):
    alone = compilers.loops_for(generation, tmp_path)
    for values in VALUES.values():
        for ours, theirs in zip(
                results(_loops, values), results(alone, values), strict=True):
            assert np.array_equal(ours, theirs)


def test_flush_to_zero_changes_no_code(tmp_path):
    values = np.concatenate([
        reference.interesting_floats(), reference.random_bits(70_000),
        np.arange(1, 2 ** 23, 999, np.uint32).view(np.float32)])
    everything = np.arange(256, dtype=np.uint8)

    def codes_and_values():
        codes = np.zeros((3, values.size), np.uint8)
        decoded = np.zeros(256, np.float32)
        for rounding, out in zip(formats.ROUNDINGS, codes, strict=True):
            formats.encode(values, out, rounding=rounding)
        formats.decode(everything, decoded)
        return codes, decoded.view(np.uint32)

    expected = codes_and_values()
    get, set_ = compilers.control_register(tmp_path)
    modes = get()
    set_(modes | 0x8040)  # flush results, take subnormal inputs as zero
    try:
        flushed = codes_and_values()
    finally:
        set_(modes)
    for ours, theirs in zip(flushed, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_many_threads_at_once_give_the_same_results():
    values = reference.random_in_range(200_000)
    shared = values.copy()

    def work(seed):
        codes = np.empty(values.size, np.uint8)
        decoded = np.empty_like(values)
        formats.encode(shared, codes, rounding='stochastic', seed=seed)
        formats.decode(codes, decoded)
        return codes, decoded

    expected = [work(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for (codes, decoded), (code, value) in zip(
                pool.map(work, range(8)), expected, strict=True):
            assert np.array_equal(codes, code)
            assert np.array_equal(decoded, value)


def test_buffers_of_different_length_are_refused():
    floats, codes = np.zeros(3, np.float32), np.zeros(4, np.uint8)
    ones = np.zeros(4, np.float32)
    calls = [
        lambda: _loops.encode(floats, codes, 0, 0, 0),
        lambda: _loops.decode(codes, floats),
        lambda: _loops.add(codes, codes[1:], codes.copy(), 0, 0, 0),
        lambda: _loops.accumulate(codes, floats),
        lambda: _loops.ratio_encode(
            ones, ones, codes, floats, 1.0, 1.0, 1.0, 1.0, 0, 0, 0),
        lambda: _loops.ratio_decode(codes, floats, ones, 1.0, 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match='differ in length'):
            call()
