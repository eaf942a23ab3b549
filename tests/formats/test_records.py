"""Records against NumPy and ml_dtypes."""
from chainer_fp8pipe.codecs import BlockScaled
from chainer_fp8pipe.formats import FORMATS, RECORD

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import records_reference as reference
from .reference import same_bits

FLOATS = st.floats(width=32)
FINITE = st.floats(-1e4, 1e4, width=32)

pytestmark = pytest.mark.filterwarnings(
    'ignore:.*encountered in:RuntimeWarning')


def encoded(values, name, **options):
    """Records as rows of bytes, and how many are not finite."""
    made = FORMATS[name]
    records = np.full(-(-values.size // RECORD), b'\xa5' * made.nbytes,
                      made.dtype)
    bad = made.encode(values, records, **options)
    return records.view(np.uint8).reshape(-1, made.nbytes), bad


def records_of(rows):
    return np.ascontiguousarray(rows).view(f'V{rows.shape[1]}')[:, 0]


def is_finite(records):
    return BlockScaled(f'int{4 + (records.itemsize == 21)}').is_finite(records)


def decoded(rows, n, name, **options):
    out = np.full(n, 7, np.float32)
    FORMATS[name].decode(records_of(rows), out, **options)
    return out


def check(values, name, factor=1.0, residual=None):
    """All that an encoding does is what the reference does."""
    expected, left = reference.encode(values, name, factor, residual)
    mine = None if residual is None else residual.copy()
    rows, bad = encoded(values, name, factor=factor, residual=mine)
    np.testing.assert_array_equal(rows, expected)
    assert bad == (expected[:, -1] == 255).sum()
    assert is_finite(records_of(rows)) == (not bad)
    if mine is not None:
        np.testing.assert_array_equal(mine, left)
        assert np.isfinite(mine).all()


def check_decoded(rows, n, name, factor=1.0):
    expected = reference.decode(rows, n, name, factor)
    found = decoded(rows, n, name, factor=factor)
    np.testing.assert_array_equal(found, expected)
    total = np.linspace(-3, 3, n, dtype=np.float32)
    sums = total + reference.decode(rows, n, name)
    FORMATS[name].accumulate(records_of(rows), total)
    np.testing.assert_array_equal(total, sums)


# --- exact bits --------------------------------------------------------------

@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize('factor', [1.0, 0.3, 2.0 ** -40])
def test_interesting_values_have_the_references_bits(name, factor):
    values = reference.interesting(name)
    check(values, name, factor)
    residual = np.random.default_rng(1).normal(0, 1, values.size)
    check(values, name, factor, residual.astype(np.float32))


@pytest.mark.parametrize('name', FORMATS)
@given(values=st.lists(FLOATS, max_size=70),
       factor=st.floats(0, 1e4, width=32))
def test_any_values_have_the_references_bits(name, values, factor):
    check(np.array(values, np.float32), name, factor)


@pytest.mark.parametrize('name', FORMATS)
@given(pairs=st.lists(st.tuples(FINITE, FINITE), max_size=70),
       factor=st.sampled_from([1.0, 1 / 3, 2.0 ** -10]))
def test_any_residuals_have_the_references_bits(name, pairs, factor):
    values, residual = np.array(pairs, np.float32).reshape(-1, 2).T.copy()
    check(values, name, factor, residual)


@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize('factor', [1.0, 0.3])
def test_every_scale_and_every_bit_is_decoded_as_by_the_reference(name,
                                                                  factor):
    rows = np.random.default_rng(0).integers(
        0, 256, (1024, FORMATS[name].nbytes), dtype=np.uint8)
    rows[:, -1] = np.arange(1024) % 256
    check_decoded(rows, 1024 * RECORD, name, factor)


@pytest.mark.parametrize('name', FORMATS)
def test_the_last_record_may_have_fewer_elements(name):
    values = reference.interesting(name, 3)[-2000:]
    for n in range(71):
        part, rest = values[n:2 * n].copy(), values[:n].copy()
        check(part, name)
        check(part, name, 0.5, np.where(np.isfinite(rest), rest, 0))
        check_decoded(encoded(part, name)[0], n, name)


@pytest.mark.parametrize('name', FORMATS)
def test_arrays_may_begin_at_any_address(name):
    values = reference.interesting(name)
    expected, _ = encoded(values, name)
    for offset in (1, 2, 3):
        room = np.zeros(values.nbytes + offset, np.uint8)[offset:]
        moved = room.view(np.float32)
        moved[:] = values
        rows, _ = encoded(moved, name)
        np.testing.assert_array_equal(rows, expected)
        FORMATS[name].decode(records_of(rows), moved)
        np.testing.assert_array_equal(
            moved, decoded(expected, values.size, name))


# --- what the bits say -------------------------------------------------------

@pytest.mark.parametrize(('name', 'bits'), [
    ('int4', np.arange(-7, 8)), ('int5', np.arange(-15, 16))])
def test_byte_j_has_elements_j_and_16_further(name, bits):
    """Scale 1, whose code is 4 * 49."""
    for seed in range(20):
        units = np.random.default_rng(seed).choice(bits, 32)
        units[seed] = bits[-1]
        rows, _ = encoded(units.astype(np.float32), name)
        assert rows[0, -1] == 4 * 49
        four = (units & 15).astype(np.uint8)
        np.testing.assert_array_equal(rows[0, :16], four[:16] | four[16:] << 4)
        if name == 'int5':
            word = int.from_bytes(rows[0, 16:20].tobytes(), 'little')
            assert [word >> i & 1 for i in range(32)] == [*(units < 0)]


def test_int4s_nibbles_are_ml_dtypes_int4():
    units = np.random.default_rng(0).integers(-7, 8, 32).astype(np.float32)
    units[5] = 7
    rows, _ = encoded(units, 'int4')
    nibbles = np.concatenate([rows[0, :16] & 15, rows[0, :16] >> 4])
    np.testing.assert_array_equal(
        nibbles.view(ml_dtypes.int4).astype(np.float32), units)


@pytest.mark.parametrize('name', ['int4', 'int5'])
@given(largest=st.floats(2.0 ** -44, 2.0 ** 14, width=32))
def test_integers_are_never_clipped_and_scales_hardly_too_large(name,
                                                                largest):
    values = np.zeros(32, np.float32)
    values[9] = largest
    code = int(encoded(values, name)[0][0, -1])
    top = reference.TOP[name]
    # The reciprocal of top is rounded: one float32 step.
    assert reference.scale(code, name) * top >= largest * (1 - 2.0 ** -23)
    assert reference.scale(code - 1, name) * top < largest * (1 + 2.0 ** -22)


@pytest.mark.parametrize('name', ['int4', 'int5'])
def test_scales_are_four_to_a_power_of_two_from_2_to_minus_49_on(name):
    top = reference.TOP[name]
    for code in (1, 2, 3, 4, 196, 197, 253, 254):
        rows = np.zeros((1, FORMATS[name].nbytes), np.uint8)
        rows[0, 0], rows[0, -1] = 1, code
        value = decoded(rows, 1, name)[0]
        assert value == 2.0 ** (code // 4 - 49) * (1 + code % 4 / 4)
        values = np.float32([value * top * 0.99])
        assert encoded(values, name)[0][0, -1] == code


@pytest.mark.parametrize(('name', 'largest', 'ties'), [
    ('int4', 7, [(0.5, 0), (1.5, 2), (2.5, 2), (6.5, 6)]),
    ('int5', 15, [(0.5, 0), (1.5, 2), (2.5, 2), (14.5, 14)]),
    ('e2m1', 4, [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2),
                 (3.5, 4), (5, 4)])])
def test_ties_go_to_the_even_neighbour(name, largest, ties):
    values = np.zeros(32, np.float32)
    values[0] = largest
    for place, (tie, _) in enumerate(ties):
        values[1 + place], values[11 + place] = tie, -tie
    out = decoded(encoded(values, name)[0], 32, name)
    for place, (_, even) in enumerate(ties):
        assert (out[1 + place], out[11 + place]) == (even, -even)


def test_e2m1_clips_what_lies_above_6_times_the_scale():
    values = np.zeros(64, np.float32)
    values[[3, 5, 35]] = 7.99, -7, 8
    out = decoded(encoded(values, 'e2m1')[0], 64, 'e2m1')
    assert [*out[[3, 5, 35]]] == [6, -6, 8]
    residual = np.zeros(64, np.float32)
    encoded(values, 'e2m1', residual=residual)
    np.testing.assert_array_equal(residual, values - out)


@pytest.mark.parametrize('name', FORMATS)
def test_what_is_too_small_for_every_scale_is_zero_and_stays_behind(name):
    tiny = np.float32([2.0 ** -149, -2.0 ** -130, 0, -0.0] * 8)
    residual = np.zeros(32, np.float32)
    rows, bad = encoded(tiny, name, residual=residual)
    assert (rows[0, -1], bad) == (0, 0)
    np.testing.assert_array_equal(decoded(rows, 32, name), 0)
    np.testing.assert_array_equal(residual, tiny)


@pytest.mark.parametrize('name', ['int4', 'int5'])
def test_what_is_too_large_for_every_scale_counts_as_infinite(name):
    """Feedback could not catch up with what is clipped each time."""
    largest = np.float32(reference.TOP[name] * 1.5 * 2.0 ** 14)
    values = np.zeros(64, np.float32)
    values[3], values[40] = largest * np.float32(0.999), -2 * largest
    residual = np.ones(64, np.float32)
    rows, bad = encoded(values, name, residual=residual)
    assert (bad, rows[0, -1], rows[1, -1]) == (1, 254, 255)
    assert np.isnan(decoded(rows, 64, name)[32:]).all()
    assert not residual[32:].any()


@pytest.mark.parametrize('bad', [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', FORMATS)
def test_a_record_with_nan_or_infinity_is_nan_and_leaves_nothing_out(name,
                                                                     bad):
    values = np.linspace(-1, 1, 96, dtype=np.float32)
    values[40] = bad
    residual = np.ones(96, np.float32)
    rows, count = encoded(values, name, residual=residual)
    assert (count, (rows[:, -1] == 255).tolist()) == (
        1, [False, True, False])
    out = decoded(rows, 96, name)
    np.testing.assert_array_equal(np.isnan(out), np.arange(96) // 32 == 1)
    assert not residual[32:64].any()
    assert residual[:32].any()
    assert residual[64:].any()
    total = np.zeros(96, np.float32)
    FORMATS[name].accumulate(records_of(rows), total)
    np.testing.assert_array_equal(total, out)
    assert not is_finite(records_of(rows))
    assert is_finite(records_of(rows)[::2].copy())
    assert FORMATS[name].decode(records_of(rows), out) == 1


@pytest.mark.parametrize('name', FORMATS)
def test_a_factor_that_makes_infinity_of_a_value_makes_nan_of_its_record(
        name):
    rows, bad = encoded(np.full(32, 1e30, np.float32), name, factor=1e30)
    assert bad == 1
    assert np.isnan(decoded(rows, 32, name)).all()


@pytest.mark.parametrize('name', FORMATS)
def test_bytes_of_zero_are_zeros(name):
    rows = np.zeros((3, FORMATS[name].nbytes), np.uint8)
    assert same_bits(decoded(rows, 70, name), np.zeros(70, np.float32))
    assert is_finite(records_of(rows))
    np.testing.assert_array_equal(
        encoded(np.zeros(70, np.float32), name)[0], rows)


@pytest.mark.parametrize('name', ['int4', 'int5'])
@given(st.lists(FINITE, min_size=1, max_size=64))
def test_values_and_what_is_left_of_them_make_up_all(name, values):
    """With nothing rounded: differences are small numbers of steps.

    But of outliers some is given up.
    """
    values = np.array(values, np.float32)
    residual = np.zeros_like(values)
    rows, _ = encoded(values, name, residual=residual)
    lost = decoded(rows, values.size, name).astype(float) + residual != values
    for start in range(0, values.size, 32):
        record, left = (abs(array[start:start + 32])
                        for array in (values, residual))
        outliers = record == record.max()
        assert not lost[start:start + 32][~outliers].any()
        if lost[start:start + 32].any():
            assert left[outliers].max() == record[~outliers].max()
            assert record.max() > 10 * record[~outliers].max()


@pytest.mark.parametrize('name', FORMATS)
def test_an_outlier_is_over_with_the_next_encoding(name):
    """And what it has kept out of its record comes with that, whole."""
    usual = np.random.default_rng(3).normal(0, 1, 32).astype(np.float32)
    values, residual = usual.copy(), np.zeros(32, np.float32)
    values[9] = 9.3e6 if name == 'e2m1' else 1.1e5
    sent = []
    for _ in range(2):
        rows, _ = encoded(values, name, residual=residual)
        sent.append(decoded(rows, 32, name))
        values = usual
    others = np.arange(32) != 9
    assert not sent[0][others].any()
    assert abs(sent[1][9]) < 2 * abs(usual).max()
    np.testing.assert_allclose(sent[1][others], 2 * usual[others],
                               atol=abs(usual).max())


def test_what_e2m1_has_decoded_is_encoded_with_the_same_bits():
    values = np.random.default_rng(0).normal(0, 1, 3200).astype(np.float32)
    rows, _ = encoded(values, 'e2m1')
    again, _ = encoded(decoded(rows, 3200, 'e2m1'), 'e2m1')
    np.testing.assert_array_equal(again, rows)
