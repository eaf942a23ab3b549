"""CuPy arrays: against the CPU bit for bit, and with a stand-in for CuPy.

And the GPU's compiler takes the kernels.
"""
import re

from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import gpu

import numpy as np
import pytest

from . import compilers, reference


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


def both(device, operation, arrays, **options):
    """Runs on the CPU and on the device; all arrays must agree after it.

    Returns what the operation returned, which must agree, too.
    """
    on_cpu = {name: array.copy() for name, array in arrays.items()}
    on_device = {name: device.to(array) for name, array in arrays.items()}
    expected = operation(**on_cpu, **options)
    result = operation(**on_device, **options)
    for name, array in on_cpu.items():
        there = device.back(on_device[name])
        assert there.tobytes() == array.tobytes(), name
    assert result == expected
    return result


@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_encode(device, values, codes, rounding):
    both(device, formats.encode, {'values': values, 'out': codes},
         rounding=rounding, seed=3)


def test_decode(device, values, codes):
    both(device, formats.decode, {'codes': codes, 'out': values})


@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_add(device, codes, rounding):
    arrays = {'a': codes, 'b': codes[::-1].copy(), 'out': codes}
    both(device, formats.add, arrays, rounding=rounding, seed=3)


def test_add_in_place(device, codes):
    expected = np.empty_like(codes)
    formats.add(codes, codes[::-1].copy(), expected)
    a, b = device.to(codes), device.to(codes[::-1].copy())
    formats.add(a, b, a)
    assert np.array_equal(device.back(a), expected)


def test_accumulate(device, values, codes):
    both(device, formats.accumulate, {'codes': codes, 'total': values})


@pytest.mark.parametrize(('scale', 'feedback'), [
    (1.0, {}), (1e4, {}), (3.0, {'bound': np.inf}), (3.0, {'bound': 3.5})])
@pytest.mark.parametrize('rounding', formats.ROUNDINGS)
def test_ratio_encode(device, values, codes, rounding, scale, feedback):
    arrays = {
        'gradient': values, 'parameter': values[::-1].copy(), 'out': codes}
    if feedback:
        arrays['residual'] = np.roll(values, 1)
    counts = both(device, formats.ratio_encode, arrays, scale=scale,
                  rounding=rounding, seed=3, **feedback)
    assert counts.clipped > 0
    assert counts.nonfinite > 0


@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
def test_ratio_decode(device, values, codes, dtype):
    arrays = {'wire': codes if dtype == 'uint8' else values,
              'parameter': values, 'out': values}
    assert both(device, formats.ratio_decode, arrays, scale=3.0) > 0


def test_arrays_may_be_empty_or_have_several_dimensions(device):
    for shape in [(0,), (), (2, 3), (1, 0)]:
        both(device, formats.encode, {
            'values': np.ones(shape, np.float32),
            'out': np.zeros(shape, np.uint8)})
    both(device, formats.ratio_encode, {
        'gradient': np.ones((2, 3), np.float32),
        'parameter': np.ones((3, 2), np.float32),
        'out': np.zeros(6, np.uint8)}, scale=1.0)


def test_cpu_and_gpu_arrays_may_not_be_mixed(device):
    with pytest.raises(TypeError, match='out is NumPy and values is CuPy'):
        formats.encode(device.to(np.ones(2, np.float32)), np.ones(2, np.uint8))


def test_overlap_on_the_device_is_refused(device):
    room = device.to(np.ones(2, np.float32))
    with pytest.raises(ValueError, match='out shares memory with values'):
        formats.encode(room, room.view(np.uint8)[:2])


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
