"""CuPy arrays: against the CPU bit for bit, and with a stand-in for CuPy.

And the GPU's compiler takes the kernels.
"""
import re

from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import FORMATS, RECORD, gpu

import numpy as np
import pytest

from . import compilers, records_reference, reference

FORMAT = pytest.mark.parametrize('made', FORMATS.values(), ids=[*FORMATS])


@pytest.fixture(scope='module')
def values():
    return np.concatenate([
        reference.interesting_floats(), reference.random_bits(100_000),
        reference.random_in_range(100_001)])


@pytest.fixture(scope='module')
def codes(values):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, values.size, dtype=np.uint8)
    codes[:100_000] &= 0xBF  # a chunk that is all finite has its own loops
    return codes


def bits_of(array):
    """A processor's own NaN, as of infinity times zero, is any NaN."""
    if array.dtype != np.float32:
        return array
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def both(device, operation, arrays, **options):
    """Runs on the CPU and on the device; all arrays must agree after it.

    Returns what the operation returned, which must agree, too.  Records are
    rows of bytes on the device.
    """
    here = {name: array.copy() for name, array in arrays.items()}
    there = {name: device.to(array) for name, array in arrays.items()}
    as_records = dict(here)
    if 'records' in here:
        dtype = f'V{here["records"].shape[1]}'
        as_records['records'] = here['records'].view(dtype)[:, 0]
    expected = operation(**as_records, **options)
    found = operation(**there, **options)
    for name, array in here.items():
        back, exact = device.back(there[name]), 'records' not in here
        if exact:
            assert back.tobytes() == array.tobytes(), name
        np.testing.assert_array_equal(bits_of(back), bits_of(array), name)
    assert found == expected
    return found


# --- fp8 ---------------------------------------------------------------------

@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_codes_and_their_sums(device, values, codes, rounding):
    options = {'rounding': rounding, 'seed': 3}
    both(device, formats.encode, {'values': values, 'out': codes}, **options)
    both(device, formats.add, {'a': codes, 'b': codes[::-1].copy(),
                               'out': codes}, **options)


def test_values_of_codes(device, values, codes):
    both(device, formats.decode, {'codes': codes, 'out': values})
    both(device, formats.accumulate, {'codes': codes, 'total': values})
    for wire in (codes, values):
        assert both(device, formats.ratio_decode, {
            'wire': wire, 'parameter': values, 'out': values}, scale=3.0) > 0


def test_a_sum_in_place(device, codes):
    expected = np.empty_like(codes)
    formats.add(codes, codes[::-1].copy(), expected)
    a, b = device.to(codes), device.to(codes[::-1].copy())
    formats.add(a, b, a)
    assert np.array_equal(device.back(a), expected)


@pytest.mark.parametrize(('scale', 'feedback'), [
    (1.0, {}), (1e4, {}), (3.0, {'bound': np.inf}), (3.0, {'bound': 3.5})])
@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_ratios(device, values, codes, rounding, scale, feedback):
    arrays = {
        'gradient': values, 'parameter': values[::-1].copy(), 'out': codes}
    if feedback:
        arrays['residual'] = np.roll(values, 1)
    counts = both(device, formats.ratio_encode, arrays, scale=scale,
                  rounding=rounding, seed=3, **feedback)
    assert counts.clipped > 0
    assert counts.nonfinite > 0


def test_arrays_may_be_empty_or_have_several_dimensions(device):
    for shape in [(0,), (), (2, 3), (1, 0)]:
        both(device, formats.encode, {
            'values': np.ones(shape, np.float32),
            'out': np.zeros(shape, np.uint8)})
    both(device, formats.ratio_encode, {
        'gradient': np.ones((2, 3), np.float32),
        'parameter': np.ones((3, 2), np.float32),
        'out': np.zeros(6, np.uint8)}, scale=1.0)


# --- records -----------------------------------------------------------------

def random(n, seed=0):
    return np.random.default_rng(seed).normal(0, 1, n).astype(np.float32)


def rows_for(made, n):
    """Rows for n elements, that hold something else yet."""
    return np.full((-(-n // RECORD), made.nbytes), 0xA5, np.uint8)


def random_rows(made, n=1024):
    """Every scale, and every bit of an element."""
    rows = np.random.default_rng(0).integers(0, 256, (n, made.nbytes),
                                             dtype=np.uint8)
    rows[:, -1] = np.arange(n) % 256
    return rows


def encodes(device, made, values, residual=None, factor=1.0):
    arrays = {'values': values, 'records': rows_for(made, values.size)}
    if residual is not None:
        arrays['residual'] = residual
    return both(device, made.encode, arrays, factor=factor)


@FORMAT
@pytest.mark.parametrize('factor', [1.0, 0.3, 2.0 ** -40])
def test_interesting_values_are_encoded(device, made, factor):
    values = records_reference.interesting(made.name)
    for residual in (None, random(values.size)):
        assert encodes(device, made, values, residual, factor) > 0
    tiny = np.float32([2.0 ** -149, -2.0 ** -130, 2.0 ** -126, -0.0] * 40)
    assert encodes(device, made, tiny, tiny[::-1].copy(), factor) == 0
    for bad in (np.nan, -np.inf):
        values, residual = random(100), random(100, 1)
        values[40] = residual[99] = bad     # one in a record of fewer
        assert encodes(device, made, values, residual, factor) == 2


@FORMAT
def test_every_scale_and_every_bit_is_decoded_and_added(device, made):
    rows = random_rows(made)
    for factor in (1.0, 0.3):
        assert both(device, made.decode, {
            'records': rows, 'out': random(1024 * RECORD)},
            factor=factor) == 4
    both(device, made.accumulate, {'records': rows,
                                   'total': random(1024 * RECORD)})
    # Of NaN, no processor has a choice here.
    out = device.to(np.zeros(RECORD, np.float32))
    for operation in (made.decode, made.accumulate):
        operation(device.to(rows[255:256].copy()), out)
        assert set(device.back(out).view(np.uint32)) == {0x7FC00000}


@FORMAT
def test_the_last_record_may_have_fewer_elements(device, made):
    values, residual = random(300), random(300, 1)
    for n in (*range(67), 127, 128, 129, 300):
        encodes(device, made, values[:n], residual[:n])
        rows = random_rows(made)[:-(-n // RECORD)]
        both(device, made.decode, {'records': rows, 'out': values[:n]})
        both(device, made.accumulate, {'records': rows, 'total': values[:n]})


@FORMAT
def test_nothing_is_written_beside_the_arrays(device, made):
    n = 3 * RECORD + 5
    rows = device.to(rows_for(made, 6 * RECORD))
    values, residual = (device.to(random(2 * n, seed)) for seed in (0, 1))
    before = device.back(residual).copy()
    made.encode(values[n:], rows[1:5], residual=residual[n:])
    np.testing.assert_array_equal(device.back(residual)[:n], before[:n])
    made.encode(values[:n], rows[1:5], residual=residual[:n])
    assert (device.back(rows)[[0, 5]] == 0xA5).all()
    kept = device.back(values).copy()
    made.decode(rows[1:5], values[n:])
    np.testing.assert_array_equal(device.back(values)[:n], kept[:n])


@FORMAT
@pytest.mark.gpu
def test_long_arrays_on_a_gpu(real, made):
    n = 10_000_019
    values = random(n) * np.float32(2.0) ** np.random.default_rng(3).integers(
        -60, 60, n).astype(np.float32)
    assert encodes(real, made, values, random(n, 1)) == 0
    rows = random_rows(made, -(-n // RECORD))
    both(real, made.decode, {'records': rows, 'out': values}, factor=3.0)
    both(real, made.accumulate, {'records': rows, 'total': values})


# --- what is refused ---------------------------------------------------------

def test_arrays_that_do_not_go_together_are_refused(device):
    def there(shape=(2,), dtype='f4'):
        return device.to(np.ones(shape, dtype))
    int4, rows, room = FORMATS['int4'], there((2, 17), 'u1'), there((64,))
    inside = room.view(np.uint8)[:34].reshape(2, 17)
    for error, match, call in (
            (TypeError, 'out is NumPy and values is CuPy',
             lambda: formats.encode(there(), np.ones(2, np.uint8))),
            (ValueError, 'out shares memory with values',
             lambda: formats.encode(room, room.view(np.uint8)[:64])),
            (TypeError, 'records is NumPy and values is CuPy',
             lambda: int4.encode(room, np.zeros(2, int4.dtype))),
            (TypeError, 'values has dtype float64',
             lambda: int4.encode(there((64,), 'f8'), rows)),
            (ValueError, 'shape .2, 32.',
             lambda: int4.encode(there((2, 32)), rows)),
            (ValueError, '65 .*need 3 records, not 2',
             lambda: int4.encode(there((65,)), rows)),
            (ValueError, 'residual has 63',
             lambda: int4.encode(room, rows, residual=there((63,)))),
            (ValueError, 'records has shape .34,',
             lambda: int4.encode(room, there((34,), 'u1'))),
            (ValueError, 'records has shape .2, 21.',
             lambda: int4.encode(room, there((2, 21), 'u1'))),
            (ValueError, 'residual shares memory with values',
             lambda: int4.encode(room, rows, residual=room)),
            (ValueError, 'records shares memory with values',
             lambda: int4.encode(room, inside)),
            (ValueError, 'out .* must be C-contiguous',
             lambda: int4.decode(rows[:1], room[::2]))):
        with pytest.raises(error, match=match):
            call()


# --- the GPU's compiler ------------------------------------------------------

@pytest.fixture(scope='module')
def nvrtc():
    return compilers.Nvrtc()


@pytest.mark.parametrize('architecture', ['sm_80', 'sm_90'])
@pytest.mark.parametrize(
    'kernel', gpu.KERNELS.values(), ids=[*gpu.KERNELS])
def test_the_gpu_compiler_takes_every_kernel(nvrtc, kernel, architecture):
    ptx = nvrtc.ptx(compilers.cuda_source(kernel), architecture)
    assert f'.entry fp8pipe_{kernel.name}' in ptx
    # Contraction, flushing and approximate division would change bits.
    assert not re.search(r'fma\.|\.ftz|div\.(full|approx)|\.f64', ptx)


def test_a_kernel_that_does_not_compile_is_noticed(nvrtc):
    broken = gpu.KERNELS['decode']._replace(
        operation='value = e5m2_decod(code);')
    with pytest.raises(RuntimeError, match='e5m2_decod'):
        nvrtc.ptx(compilers.cuda_source(broken), 'sm_80')
