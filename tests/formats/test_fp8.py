"""The operations on NumPy arrays against independent implementations."""
from chainer_fp8pipe import formats

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from . import reference

ALL_CODES = np.arange(256, dtype=np.uint8)
FINITE_CODES = ALL_CODES[(ALL_CODES & 0x7F) < 0x7C]
ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)


def encode(values, **options):
    values = np.ascontiguousarray(values, np.float32)
    codes = np.empty(values.shape, np.uint8)
    formats.encode(values, codes, **options)
    return codes


def decode(codes):
    values = np.empty(codes.shape, np.float32)
    formats.decode(codes, values)
    return values


def add(a, b, **options):
    out = np.empty_like(a)
    formats.add(a, b, out, **options)
    return out


def inputs():
    return {
        'all halves': ALL_HALVES.astype(np.float32),
        'boundaries': reference.interesting_floats(),
        'random bits': reference.random_bits(3_000_000),
        'random in range': reference.random_in_range(3_000_000),
    }


# -- the format ---------------------------------------------------------------

def test_every_code_has_the_value_of_ml_dtypes_and_comes_back():
    for codes in (ALL_CODES, FINITE_CODES):
        assert reference.same_bits(decode(codes), reference.decode(codes))
    codes = ALL_CODES[(ALL_CODES & 0x7F) <= 0x7C]
    for rounding in formats.ROUNDINGS:
        assert np.array_equal(encode(decode(codes), rounding=rounding), codes)
    assert reference.VALUES.max() == formats.MAX
    assert reference.VALUES[1] == formats.TINY


@pytest.mark.parametrize('name', inputs())
def test_codes_are_those_of_the_reference(name):
    """Truncation is the upper byte of the half; random, a neighbour."""
    values = inputs()[name]
    assert np.array_equal(encode(values), reference.nearest(values))
    with np.errstate(all='ignore'):
        expected = reference.truncate(values)
    assert np.array_equal(encode(values, rounding='truncate'), expected)
    values = values[np.isfinite(values)]
    below, above = reference.neighbours(np.clip(values, -57344, 57344))
    result = decode(encode(values, rounding='stochastic', seed=1))
    assert np.array_equal(np.signbit(result), np.signbit(values))
    magnitude = np.abs(result)
    assert np.all((magnitude == below) | (magnitude == above))


@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
@pytest.mark.parametrize(('values', 'code'), [
    ([57345, 61440, 65504, 65520, 1e10, np.finfo(np.float32).max], 0x7B),
    ([np.inf], 0x7C), ([0.0], 0),
    (np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view('f4'),
     0x7E)])     # every NaN becomes the quiet one of its sign
def test_what_is_no_usual_number_keeps_its_sign(values, code, rounding):
    values = np.asarray(values, np.float32)
    assert set(encode(values, rounding=rounding)) == {code}
    assert set(encode(-values, rounding=rounding)) == {code | 0x80}


# -- stochastic rounding ------------------------------------------------------

@pytest.mark.parametrize('value', [
    1.1, -1.1, 1.99, 3.001, 50000.0, 6e-5, 3.3e-5, 1e-5, -4e-6, 2.0 ** -20])
def test_stochastic_is_unbiased_within_its_standard_error(value):
    n = 1_000_000
    values = np.full(n, value, np.float32)
    exact = float(values[0])
    result = decode(encode(values, rounding='stochastic', seed=7))
    (below,), (above,) = reference.neighbours([exact])
    p_up = (abs(exact) - below) / (above - below)
    standard_error = (above - below) * np.sqrt(p_up * (1 - p_up) / n)
    assert abs(result.mean(dtype=np.float64) - exact) < 4 * standard_error


def test_stochastic_is_unbiased_over_seeds_for_one_element():
    value = np.array([0, 1.1], np.float32)
    n = 20_000
    up = sum(encode(value, rounding='stochastic', seed=seed)[1] == 0x3D
             for seed in range(n))
    assert abs(up / n - 0.4) < 4 * np.sqrt(0.4 * 0.6 / n)


def test_stochastic_errors_of_neighbouring_elements_and_seeds_are_unrelated():
    n = 200_000
    values = np.full(n, 1.125, np.float32)  # half way
    first = decode(encode(values, rounding='stochastic', seed=1)) - values
    second = decode(encode(values, rounding='stochastic', seed=2)) - values
    limit = 4 / np.sqrt(n)
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    for lag in (1, 2, 3, 4, 8, 16, 64, 256, 65536):
        correlation = np.corrcoef(first[lag:], first[:-lag])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(n - lag)


def test_any_integer_is_a_seed_and_gives_the_same_codes_again():
    values, found = reference.random_in_range(10_000), set()
    for seed in (-1, 0, 5, 6, 2 ** 63, np.int64(3)):
        once, again = (encode(values, rounding='stochastic', seed=seed)
                       for _ in range(2))
        assert np.array_equal(once, again)
        found.add(once.tobytes())
    assert len(found) == 6


# -- sums ---------------------------------------------------------------------

def all_pairs(codes=ALL_CODES):
    a, b = np.meshgrid(codes, codes)
    return a.ravel(), b.ravel()


@pytest.mark.parametrize(
    'summands', [ALL_CODES, FINITE_CODES], ids=['any', 'finite'])
@pytest.mark.parametrize(
    ('rounding', 'expected'),
    [('nearest', reference.nearest), ('truncate', reference.truncate)])
def test_the_sum_of_any_two_codes_is_rounded_once(
        rounding, expected, summands):
    a, b = all_pairs(summands)
    with np.errstate(invalid='ignore'):
        exact = (reference.decode(a).astype(np.float64)
                 + reference.decode(b).astype(np.float64))
    codes = expected(exact)
    codes[np.isnan(exact)] = 0x7E
    assert np.array_equal(add(a, b, rounding=rounding), codes)


def test_a_stochastic_sum_is_unbiased():
    n = 1_000_000
    a, b = encode(np.full(n, 4.0)), encode(np.full(n, 0.375))
    total = decode(add(a, b, rounding='stochastic', seed=3))
    standard_error = np.sqrt(0.375 * 0.625 / n)
    assert abs(total.mean(dtype=np.float64) - 4.375) < 4 * standard_error


@pytest.mark.parametrize('place', ['a', 'b'])
def test_a_sum_may_be_written_over_either_operand(place):
    a, b = all_pairs()
    expected = add(a, b)
    out = a if place == 'a' else b
    formats.add(a, b, out)
    assert np.array_equal(out, expected)


def test_accumulate_adds_the_values_in_float32():
    rng = np.random.default_rng(0)
    codes = FINITE_CODES.repeat(100)
    total = rng.standard_normal(codes.size, dtype=np.float32)
    expected = total + reference.decode(codes)
    formats.accumulate(codes, total)
    assert reference.same_bits(total, expected)


def test_accumulate_keeps_infinity_and_nan():
    codes = np.array([0x7C, 0xFC, 0x7E, 0x7C], np.uint8)
    total = np.array([1, 2, 3, -np.inf], np.float32)
    formats.accumulate(codes, total)
    assert np.array_equal(
        total, np.array([np.inf, -np.inf, np.nan, np.nan], np.float32),
        equal_nan=True)


# -- ratios -------------------------------------------------------------------

def ratio_data(n=50_000, seed=0):
    rng = np.random.default_rng(seed)
    gradient = rng.standard_normal(n, dtype=np.float32)
    gradient *= 10 ** rng.uniform(-12, 3, n).astype(np.float32)
    parameter = rng.standard_normal(n, dtype=np.float32)
    parameter[::7] = 0
    return gradient, parameter


def expected_wire(value, parameter, scale, epsilon):
    """Codes, clipped and non-finite elements, computed with NumPy."""
    with np.errstate(all='ignore'):
        weight = np.abs(parameter) + np.float32(epsilon)
        ratio = value / weight * np.float32(scale)
    overflowed = np.isfinite(value) & np.isinf(ratio)
    limited = np.where(overflowed, np.copysign(1e30, ratio), ratio)
    codes = reference.nearest(limited)
    codes[np.isnan(ratio)] = 0x7E
    clipped = np.isfinite(value) & (np.abs(ratio) > 57344)
    return codes, clipped, (codes & 0x7F) >= 0x7C


@pytest.mark.parametrize('scale', [1e-3, 1.0, 300.0, 1e30])
@pytest.mark.parametrize('epsilon', [1e-5, 0.1])
def test_ratio_encode_follows_algorithm_1(scale, epsilon):
    gradient, parameter = ratio_data()
    gradient[:4] = [np.inf, -np.inf, np.nan, 0]
    before = gradient.copy()
    out = np.empty(gradient.shape, np.uint8)
    counts = formats.ratio_encode(
        gradient, parameter, out, scale=scale, epsilon=epsilon)
    codes, clipped, nonfinite = expected_wire(
        gradient, parameter, scale, epsilon)
    assert np.array_equal(out, codes)
    assert counts == (clipped.sum(), nonfinite.sum())
    assert counts.nonfinite == 3
    assert reference.same_bits(gradient, before)


@pytest.mark.parametrize('scale', [1.0, 300.0])
@pytest.mark.parametrize('bound', [np.inf, 14.0, 0.0])
def test_the_residual_is_what_the_code_leaves_out_up_to_a_bound(scale, bound):
    gradient, parameter = ratio_data()
    gradient[:4] = [np.inf, -np.inf, np.nan, 0]
    residual = ratio_data(seed=1)[0]
    value = gradient + residual
    out = np.empty(gradient.shape, np.uint8)
    counts = formats.ratio_encode(
        gradient, parameter, out, scale=scale, residual=residual, bound=bound)
    codes, clipped, nonfinite = expected_wire(value, parameter, scale, 1e-5)
    inverse = np.float32(1) / np.float32(scale)
    weight = np.abs(parameter) + np.float32(1e-5)
    limit = np.float32(bound)
    with np.errstate(invalid='ignore'):
        left = np.clip(value - reference.decode(codes) * inverse * weight,
                       -limit, limit)
    left[nonfinite] = 0
    assert bound or not left.any()
    assert np.array_equal(out, codes)
    assert counts == (clipped.sum(), nonfinite.sum())
    np.testing.assert_array_equal(residual, left)


@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_ratio_encode_rounds_as_encode_does(rounding):
    gradient, _ = ratio_data()
    ones = np.ones_like(gradient)
    out = np.empty(gradient.shape, np.uint8)
    residual = np.zeros_like(gradient)
    expected = encode(gradient / np.float32(1.5), rounding=rounding, seed=9)
    for feedback in (None, residual):
        formats.ratio_encode(gradient, ones, out, scale=1.0, epsilon=0.5,
                         residual=feedback, rounding=rounding, seed=9)
        assert np.array_equal(out, expected)


BIG = np.finfo(np.float32).max


@pytest.mark.parametrize('feedback', [False, True])
@pytest.mark.parametrize(('gradient', 'parameter', 'scale', 'codes',
                          'counts'), [
    # A finite gradient never becomes infinite.
    ([BIG, -BIG, 1e30, 1.0], [0, 0, 0, 0], 1e10, [0x7B, 0xFB, 0x7B, 0x7B],
     (4, 0)),
    # A NaN parameter shows on the wire and leaves nothing out.
    ([1, 0], [np.nan, 1], 1.0, [0x7E, 0], (0, 1))])
def test_ratios_that_overflow_or_are_none(gradient, parameter, scale, codes,
                                          counts, feedback):
    out = np.empty(len(codes), np.uint8)
    residual = np.zeros(len(codes), np.float32) if feedback else None
    assert formats.ratio_encode(
        np.array(gradient, 'f4'), np.array(parameter, 'f4'), out, scale=scale,
        residual=residual) == counts
    assert list(out) == codes
    assert residual is None or np.isfinite(residual).all()


@pytest.mark.parametrize('kind', ['codes', 'floats'])
def test_ratio_decode_undoes_the_ratio(kind):
    rng = np.random.default_rng(0)
    _, parameter = ratio_data()
    codes = rng.integers(0, 256, parameter.size, dtype=np.uint8)
    wire = reference.decode(codes)
    scale = 300.0
    inverse = np.float32(1) / np.float32(scale)
    weight = np.abs(parameter) + np.float32(1e-5)
    expected = wire * inverse * weight
    out = np.empty_like(parameter)
    nonfinite = formats.ratio_decode(
        codes if kind == 'codes' else wire, parameter, out, scale=scale)
    assert np.array_equal(out, expected, equal_nan=True)
    assert nonfinite == (~np.isfinite(expected)).sum() > 0
    if kind == 'floats':        # it may be written over
        formats.ratio_decode(wire, parameter, wire, scale=scale)
        assert reference.same_bits(wire, out)


def test_a_nan_that_arithmetic_makes_is_always_the_same():
    negative_nan = np.array([0xFFC12345], np.uint32).view(np.float32)
    one = np.ones(1, np.float32)
    out = np.empty(1, np.float32)
    total = negative_nan.copy()
    formats.ratio_decode(negative_nan, one, out, scale=1.0)
    formats.accumulate(np.zeros(1, np.uint8), total)
    assert out.view(np.uint32) == total.view(np.uint32) == 0x7FC00000


# -- any length, any address, any shape ---------------------------------------

@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_every_length_and_offset_gives_the_same_codes(rounding):
    values = reference.random_in_range(300)
    whole = encode(values, rounding=rounding)
    for n in range(101):
        assert np.array_equal(
            encode(values[:n], rounding=rounding), whole[:n])
    for offset in range(1, 70):
        room = np.zeros(4 * 200 + 80, np.uint8)
        unaligned = room[offset:offset + 800].view(np.float32)
        unaligned[:] = values[:200]
        codes = np.zeros(300, np.uint8)[offset:offset + 200]
        formats.encode(unaligned, codes, rounding=rounding)
        assert np.array_equal(codes, whole[:200])


@pytest.mark.parametrize('n', [*range(40), 63, 64, 65, 100])
def test_every_operation_takes_any_length_at_any_address(n):
    room = np.zeros(4 * n + 8, np.uint8)
    gradient, parameter = ratio_data(n)
    codes = encode(gradient)
    unaligned = room[1:4 * n + 1].view(np.float32)
    formats.decode(codes, unaligned)
    assert reference.same_bits(unaligned.copy(), reference.decode(codes))
    formats.accumulate(codes, unaligned)
    assert np.array_equal(unaligned, 2 * reference.decode(codes))
    out = room[3:3 + n].copy()
    unaligned[:] = gradient
    formats.ratio_encode(unaligned, parameter, out, scale=1.0)
    assert np.array_equal(
        out, expected_wire(gradient, parameter, 1.0, 1e-5)[0])
    assert not room[0]
    assert not room[4 * n + 1:].any()


def test_shapes_may_differ_and_may_have_no_dimension():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = np.empty((3, 1, 2), np.uint8)
    formats.encode(values, out)
    assert np.array_equal(out.ravel(), reference.nearest(values.ravel()))
    scalar = np.empty((), np.uint8)
    formats.encode(np.array(2.0, np.float32), scalar)
    assert scalar == 0x40


def test_long_arrays_are_counted_across_chunks():
    n = 200_003
    gradient = np.full(n, 1e9, np.float32)
    gradient[::2] = np.inf
    ones = np.ones(n, np.float32)
    counts = formats.ratio_encode(
        gradient, ones, np.empty(n, np.uint8), scale=1.0)
    assert counts == (n // 2, n - n // 2)
    assert formats.ratio_decode(gradient, ones, ones.copy(), scale=1.0) == (
        n - n // 2)


@hypothesis.given(
    hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)),
    st.floats(2.0 ** -60, 2.0 ** 60, width=32))
def test_code_and_residual_add_up_to_the_gradient(gradient, scale):
    gradient = gradient[np.abs(gradient) < 1e20]
    parameter = np.ones_like(gradient)
    residual = np.zeros_like(gradient)
    out = np.empty(gradient.shape, np.uint8)
    decoded = np.empty_like(gradient)
    formats.ratio_encode(gradient, parameter, out, scale=scale, epsilon=1.0,
                     residual=residual)
    formats.ratio_decode(out, parameter, decoded, scale=scale, epsilon=1.0)
    total = decoded.astype(np.float64) + residual
    # The subtraction rounds once.
    assert np.all(np.abs(total - gradient)
                  <= np.abs(residual) * 2.0 ** -24 + 2.0 ** -149)
