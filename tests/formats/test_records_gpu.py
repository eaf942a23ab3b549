"""CuPy arrays: against the CPU bit for bit, and with a stand-in for CuPy."""
from chainer_fp8pipe.formats import FORMATS, RECORD

import numpy as np
import pytest

from . import records_reference as reference

FORMAT = pytest.mark.parametrize('made', FORMATS.values(), ids=[*FORMATS])


def random(n, seed=0):
    return np.random.default_rng(seed).normal(0, 1, n).astype(np.float32)


def records_for(made, n):
    """Rows for n elements, that hold something else yet."""
    return np.full((-(-n // RECORD), made.nbytes), 0xA5, np.uint8)


def random_records(made):
    """Every scale, and every bit of an element."""
    rows = np.random.default_rng(0).integers(
        0, 256, (1024, made.nbytes), dtype=np.uint8)
    rows[:, -1] = np.arange(1024) % 256
    return rows


def bits_of(array):
    """A processor's own NaN, as of infinity times zero, is any NaN."""
    if array.dtype != np.float32:
        return array
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def both(device, made, operation, arrays, **options):
    """Runs on the CPU and on the device; all arrays must agree after it.

    Returns what the operation returned, which must agree, too.
    """
    here = {name: array.copy() for name, array in arrays.items()}
    there = {name: device.to(array) for name, array in arrays.items()}
    expected = getattr(made, operation)(**{
        **here, 'records': here['records'].view(made.dtype)[:, 0]}, **options)
    found = getattr(made, operation)(**there, **options)
    for name, array in here.items():
        np.testing.assert_array_equal(bits_of(device.back(there[name])),
                                      bits_of(array), name)
    assert found == expected
    return found


def encodes(device, made, values, residual=None, factor=1.0):
    arrays = {'values': values, 'records': records_for(made, values.size)}
    if residual is not None:
        arrays['residual'] = residual
    return both(device, made, 'encode', arrays, factor=factor)


@FORMAT
@pytest.mark.parametrize('factor', [1.0, 0.3, 2.0 ** -40])
@pytest.mark.parametrize('feedback', [False, True])
def test_interesting_values_are_encoded(device, made, factor, feedback):
    values = reference.interesting(made.name)
    residual = random(values.size) if feedback else None
    assert encodes(device, made, values, residual, factor) > 0


@FORMAT
def test_zeros_and_denormal_numbers_are_encoded(device, made):
    tiny = np.float32([2.0 ** -149, -2.0 ** -130, 2.0 ** -126, -0.0] * 40)
    assert encodes(device, made, tiny, np.zeros_like(tiny)) == 0
    assert encodes(device, made, tiny, tiny[::-1].copy(), 0.5) == 0
    assert encodes(device, made, np.zeros_like(tiny), -tiny) == 0


@FORMAT
@pytest.mark.parametrize('bad', [np.nan, -np.nan, np.inf, -np.inf])
def test_a_record_with_nan_or_infinity_leaves_nothing_out(device, made, bad):
    values, residual = random(100), random(100, 1)
    values[40] = bad
    assert encodes(device, made, values, residual) == 1
    assert encodes(device, made, residual, values) == 1
    residual[99] = bad      # of a record with fewer elements
    assert encodes(device, made, values, residual) == 2


@FORMAT
def test_every_scale_and_every_bit_is_decoded(device, made):
    rows = random_records(made)
    for factor in (1.0, 0.3):
        assert both(device, made, 'decode', {
            'records': rows, 'out': random(1024 * RECORD)},
            factor=factor) == 4


@FORMAT
def test_every_scale_and_every_bit_is_added(device, made):
    both(device, made, 'accumulate', {
        'records': random_records(made), 'total': random(1024 * RECORD)})


@FORMAT
def test_the_nan_of_a_record_is_the_cpus(device, made):
    """Here no processor has a choice."""
    rows = random_records(made)[255:256].copy()
    out = device.to(np.zeros(RECORD, np.float32))
    made.decode(device.to(rows), out, factor=2.0)
    assert set(device.back(out).view(np.uint32)) == {0x7FC00000}
    made.accumulate(device.to(rows), out)
    assert set(device.back(out).view(np.uint32)) == {0x7FC00000}


@FORMAT
def test_the_last_record_may_have_fewer_elements(device, made):
    values, residual = random(300), random(300, 1)
    for n in (*range(67), 95, 127, 128, 129, 255, 256, 257, 300):
        encodes(device, made, values[:n], residual[:n])
        rows = random_records(made)[:-(-n // RECORD)]
        both(device, made, 'decode', {'records': rows, 'out': values[:n]})
        both(device, made, 'accumulate', {'records': rows,
                                          'total': values[:n]})


@FORMAT
def test_nothing_is_written_beside_the_arrays(device, made):
    """Parts of arrays, with records that end amid those of a block."""
    n = 3 * RECORD + 5
    rows = device.to(records_for(made, 6 * RECORD))
    values, residual = (device.to(random(2 * n, seed)) for seed in (0, 1))
    before = device.back(residual).copy()
    made.encode(values[n:], rows[1:5], residual=residual[n:])
    np.testing.assert_array_equal(device.back(residual)[:n], before[:n])
    made.encode(values[:n], rows[1:5], residual=residual[:n])
    assert (device.back(rows)[[0, 5]] == 0xA5).all()
    kept = device.back(values).copy()
    made.decode(rows[1:5], values[n:])
    np.testing.assert_array_equal(device.back(values)[:n], kept[:n])
    made.decode(rows[1:5], values[:n])
    np.testing.assert_array_equal(device.back(values)[:n],
                                  device.back(values)[n:])


@FORMAT
@pytest.mark.gpu
def test_many_blocks_are_encoded_and_decoded_on_a_gpu(real, made):
    n = 10_000_019
    values = random(n) * np.float32(2.0) ** np.random.default_rng(3).integers(
        -60, 60, n).astype(np.float32)
    assert encodes(real, made, values, random(n, 1)) == 0
    rows = np.random.default_rng(2).integers(
        0, 256, (-(-n // RECORD), made.nbytes), dtype=np.uint8)
    both(real, made, 'decode', {'records': rows, 'out': values}, factor=3.0)
    both(real, made, 'accumulate', {'records': rows, 'total': values})


# --- what is refused ---------------------------------------------------------

@pytest.mark.parametrize(('changed', 'error', 'match'), [
    ({'values': np.zeros(64)}, TypeError, 'values has dtype float64'),
    ({'values': np.zeros((2, 32), 'f4')}, ValueError, 'shape .2, 32.'),
    ({'values': np.zeros(65, 'f4'), 'residual': np.zeros(65, 'f4')},
     ValueError, '65 .*need 3 records, not 2'),
    ({'residual': np.zeros(63, 'f4')}, ValueError, 'residual has 63'),
    ({'records': np.zeros(34, 'u1')}, ValueError, 'records has shape'),
    ({'records': np.zeros((2, 21), 'u1')}, ValueError,
     'records has shape .2, 21.'),
])
def test_other_arrays_are_refused(device, changed, error, match):
    given = {'values': np.zeros(64, np.float32),
             'records': np.zeros((2, 17), np.uint8),
             'residual': np.zeros(64, np.float32), **changed}
    with pytest.raises(error, match=match):
        FORMATS['int4'].encode(**{name: device.to(array)
                                  for name, array in given.items()})


def test_arrays_of_the_cpu_and_of_the_gpu_may_not_be_mixed(device):
    with pytest.raises(TypeError,
                       match='records is NumPy and values is CuPy'):
        FORMATS['int4'].encode(device.to(random(64)),
                               np.zeros(2, FORMATS['int4'].dtype))


def test_arrays_that_share_memory_or_have_gaps_are_refused(device):
    made, room = FORMATS['int4'], device.to(random(64))
    rows = device.to(records_for(made, 64))
    with pytest.raises(ValueError, match='residual shares memory with values'):
        made.encode(room, rows, residual=room)
    inside = room.view(np.uint8)[:34].reshape(2, 17)
    with pytest.raises(ValueError, match='records shares memory with values'):
        made.encode(room, inside)
    with pytest.raises(ValueError, match='out .* must be C-contiguous'):
        made.decode(rows[:1], room[::2])
