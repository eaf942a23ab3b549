"""The compiled loops: every generation of a processor, and many threads.

And those that an all-reduce calls, and Python does not.
"""
import concurrent.futures
import ctypes

from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import FORMATS, _formats

import numpy as np
import pytest

from . import compilers, records_reference, reference

#: Chunks without infinity and NaN go through loops of their own.
VALUES = {
    'any': np.concatenate([
        reference.interesting_floats(), reference.random_bits(70_001)]),
    'finite': reference.random_in_range(70_001),
}


SOURCE = '''
void call_sum(const u8 *const *codes, int count, f32 *total, size_t n)
{ sum_codes(codes, count, total, n); }
void call_accumulate(const u8 *codes, f32 *total, size_t n)
{ accumulate_codes(codes, total, n); }
int call_encode(const f32 *values, float scale, u16 *halves, size_t n)
{ return encode_halves(values, scale, halves, n); }
int call_mean(const f32 *total, float count, u16 *halves, size_t n)
{ return encode_half_means(total, count, halves, n); }
int call_decode(const u16 *halves, f32 *out, size_t n)
{ return decode_halves(halves, out, n); }
void call_accumulate_half(const u16 *halves, float scale, f32 *total, size_t n)
{ accumulate_halves(halves, scale, total, n); }
void call_add(const u16 *halves, u16 *total, size_t n)
{ add_halves(halves, total, n); }
void call_ratio_mean(const f32 *total, float count, const f32 *parameter,
                f32 *residual, u8 *codes, size_t n, int rounding,
                uint64_t *counts)
{
    Ratio q = {3.0f, 1 / 3.0f, 1e-5f, 100.0f};
    Random keys = {5, 6, 0};
    Counts result = encode_ratio_means(total, count, parameter, residual,
                                       codes, n, q, rounding, keys);
    counts[0] = result.clipped;
    counts[1] = result.nonfinite;
}
'''


@pytest.fixture(params=[*compilers.GENERATIONS, 'chosen'], scope='module')
def built(request, tmp_path_factory):
    """For a generation of x86-64, or with the choice at run time."""
    return compilers.loops_for(
        SOURCE, tmp_path_factory.mktemp('loops'),
        None if request.param == 'chosen' else request.param)


@pytest.fixture
def strips(built):
    """The functions of SOURCE."""
    return built[1]


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


def results_of_records(loops, made):
    """The bits of every operation, on an odd length."""
    values = records_reference.interesting(made.name)[:-5]
    other = np.random.default_rng(5).normal(0, 1, values.size).astype('f4')
    size = -(-values.size // 32) * made.nbytes
    bits = []
    for factor in (1.0, 1 / 3):
        residual = other.copy()
        for feedback in (None, residual):
            wire = np.zeros(size, np.uint8)
            count = loops.records_encode(values, factor, feedback, wire,
                                         made.number)
            out = other.copy()
            for adds in (True, False):
                count += loops.records_decode(wire, factor, out, adds,
                                              made.number)
                bits.append(np.nan_to_num(out).view(np.uint32))
            bits += [wire, np.array(count)]
        bits.append(residual.view(np.uint32))
    return bits


def all_results(loops):
    return [bits for values in VALUES.values()
            for bits in results(loops, values)] + [
        bits for made in FORMATS.values()
        for bits in results_of_records(loops, made)]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_generation_of_processors_gives_the_same_bits(built):
    if built[0] is not None:
        assert_same(all_results(_formats), all_results(built[0]))


def test_many_threads_at_once_give_the_same_results():
    expected = all_results(_formats)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: all_results(_formats), range(8)):
            assert_same(found, expected)


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


@pytest.mark.parametrize('call', [
    lambda three, four, codes: _formats.encode(three, codes, 0, 0, 0),
    lambda three, four, codes: _formats.decode(codes, three),
    lambda three, four, codes: _formats.add(codes, codes[1:], codes.copy(),
                                            0, 0, 0),
    lambda three, four, codes: _formats.accumulate(codes, three),
    lambda three, four, codes: _formats.ratio_encode(
        four, four, codes, three, 1.0, 1.0, 1.0, 1.0, 0, 0, 0),
    lambda three, four, codes: _formats.ratio_decode(codes, three, four, 1.0,
                                                     1.0),
    lambda three, four, codes: _formats.records_encode(
        four, 1.0, None, codes, 0),
    lambda three, four, codes: _formats.records_encode(
        four, 1.0, three, np.zeros(17, np.uint8), 0),
    lambda three, four, codes: _formats.records_encode(
        four, 1.0, None, np.zeros(17, np.uint8), 3),
    lambda three, four, codes: _formats.records_decode(codes, 1.0, four,
                                                       False, 1),
    lambda three, four, codes: _formats.records_decode(
        np.zeros(17, np.uint8), 1.0, four, True, -1)])
def test_buffers_of_different_length_are_refused(call):
    with pytest.raises(ValueError, match='differ in length'):
        call(np.zeros(3, np.float32), np.ones(4, np.float32),
             np.zeros(4, np.uint8))


# --- what an all-reduce calls ------------------------------------------------

#: Shorter than a strip, one of either length, a bit more, many with a rest.
LENGTHS = [0, 1, 100, 128, 129, 256, 257, 5000]

def address(array):
    return ctypes.c_void_p(array.ctypes.data)


def call(function, *args):
    return function(*(address(arg) if isinstance(arg, np.ndarray)
                      else ctypes.c_float(arg) if isinstance(arg, float)
                      else ctypes.c_size_t(arg) for arg in args))


def assert_same_bits(ours, theirs):
    kind = f'u{ours.itemsize}'
    np.testing.assert_array_equal(ours.view(kind), theirs.view(kind))


def one_nan(values):
    """The only NaN of sums."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def signed_nan(halves):
    """Of NaNs only the sign is kept."""
    bits = halves.view(np.uint16)
    return np.where(np.isnan(halves), bits & 0x8000 | 0x7E00, bits).astype(
        np.uint16).view(np.float16)


def random_codes(n, count, finite=False):
    codes = np.random.default_rng(n).integers(0, 256, (count, n), np.uint8)
    if n > 600:
        codes[:, 300:500] = 0x80     # -0, the sum of which with 0 is 0
    if finite:
        codes[codes & 0x7C == 0x7C] = 0x40
    return codes


def decoded(codes):
    out = np.zeros(codes.size, np.float32)
    formats.decode(codes, out)
    return out


@pytest.mark.parametrize('n', LENGTHS)
@pytest.mark.parametrize('count', [0, 1, 4, 16])
@pytest.mark.parametrize('finite', [False, True])
def test_sums_begin_with_zeros_and_take_contributions_in_order(
        strips, n, count, finite):
    codes = random_codes(n, count, finite)
    places = (ctypes.c_void_p * 16)(*(row.ctypes.data for row in codes))
    at_once, one_by_one = np.ones(n, np.float32), np.zeros(n, np.float32)
    strips.call_sum(places, count, address(at_once), ctypes.c_size_t(n))
    expected = np.zeros(n, np.float32)
    for row in codes:
        call(strips.call_accumulate, row, one_by_one, n)
        with np.errstate(invalid='ignore'):
            expected = one_nan(expected + decoded(row))
    assert_same_bits(at_once, expected)
    assert_same_bits(one_by_one, expected)


def floats(n, finite):
    """Few enough strips have a NaN that all cases are met."""
    values = reference.random_in_range(n) if finite else np.resize(
        np.concatenate([reference.random_in_range(90),
                        [np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45],
                        reference.random_in_range(600),
                        reference.interesting_floats()[:300]]), n)
    return values.astype(np.float32)


@pytest.mark.parametrize('n', LENGTHS)
@pytest.mark.parametrize('finite', [False, True])
@pytest.mark.parametrize('count', [1.0, 3.0, 4.0])
def test_halves_of_means_are_numpys(strips, n, finite, count):
    values, halves = floats(n, finite), np.ones(n, np.float16)
    with np.errstate(all='ignore'):
        expected = signed_nan(
            (values / np.float32(count)).astype(np.float16))
    is_finite = call(strips.call_mean, values, count, halves, n)
    assert_same_bits(halves, expected)
    assert bool(is_finite) == np.isfinite(expected).all()
    if count != 3:
        again = np.ones(n, np.float16)
        is_finite = call(strips.call_encode, values, 1 / count, again, n)
        assert_same_bits(again, halves)
        assert bool(is_finite) == np.isfinite(expected).all()


def test_every_half_is_decoded_and_summed_as_by_numpy(strips):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    other = np.random.default_rng(0).permutation(halves)
    total = np.linspace(-70, 70, halves.size, dtype=np.float32)
    with np.errstate(all='ignore'):
        expected = one_nan(total + halves.astype(np.float32) * 4)
        both = (halves.astype(np.float32) + other.astype(np.float32)).astype(
            np.float16)
    call(strips.call_accumulate_half, halves, 4.0, total, halves.size)
    assert_same_bits(total, expected)
    call(strips.call_add, other, halves_ := halves.copy(), halves.size)
    numbers = ~np.isnan(both)
    np.testing.assert_array_equal(np.isnan(halves_), ~numbers)
    assert_same_bits(halves_[numbers], both[numbers])
    assert set(halves_.view(np.uint16)[~numbers]) <= {0x7E00, 0xFE00}


@pytest.mark.parametrize('n', LENGTHS)
@pytest.mark.parametrize('finite', [False, True])
def test_decoding_halves_finds_what_is_not_finite(strips, n, finite):
    with np.errstate(over='ignore'):
        halves = floats(n, finite).astype(np.float16)
    if finite:
        halves[~np.isfinite(halves)] = 1
    out = np.ones(n, np.float32)
    is_finite = call(strips.call_decode, halves, out, n)
    assert_same_bits(out, signed_nan(halves).astype(np.float32))
    assert bool(is_finite) == np.isfinite(halves).all()


def separately(total, count, parameter, residual, rounding):
    """The mean's codes and counts; the residual becomes the next one."""
    with np.errstate(all='ignore'):
        gradient = total / np.float32(count)
    _formats.ratio_decode(gradient, parameter, gradient, 1 / 3, 1e-5)
    codes = np.zeros(total.size, np.uint8)
    counts = _formats.ratio_encode(gradient, parameter, codes, residual, 3.0,
                                 1 / 3, 1e-5, 100.0, rounding, 5, 6)
    return codes, counts


@pytest.mark.parametrize('n', LENGTHS)
@pytest.mark.parametrize('finite', [False, True])
@pytest.mark.parametrize('count', [3.0, 4.0])
@pytest.mark.parametrize('rounding', [0, 1, 2])
def test_means_are_encoded_as_in_separate_steps(
        strips, n, finite, count, rounding):
    total, parameter = floats(n, finite), floats(n, finite)[::-1].copy()
    if n > 4000:
        parameter[:2000] = reference.random_in_range(2000)
        parameter[1000:1200] = 0
    residual = reference.random_in_range(n) if n else np.zeros(0, np.float32)
    expected = residual.copy()
    codes, counts = np.zeros(n, np.uint8), np.zeros(2, np.uint64)
    strips.call_ratio_mean(
        address(total), ctypes.c_float(count), address(parameter),
        address(residual), address(codes), ctypes.c_size_t(n), rounding,
        address(counts))
    expected_codes, expected_counts = separately(
        total, count, parameter, expected, rounding)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(residual, expected)
    assert tuple(counts) == expected_counts
