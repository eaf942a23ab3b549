"""The GPU's kernels where there is no GPU: compiled, and run on the CPU."""
import re

from chainer_fp8pipe import fp8
from chainer_fp8pipe.fp8 import kernels

import numpy as np
import pytest

from . import compilers, reference

SEED = 11


@pytest.fixture(scope='module')
def nvrtc():
    return compilers.Nvrtc()


@pytest.fixture(scope='module')
def host(tmp_path_factory):
    return compilers.host_kernels(tmp_path_factory.mktemp('kernels'))


@pytest.fixture(scope='module')
def values():
    return np.concatenate([
        reference.interesting_floats(), reference.random_bits(100_000),
        reference.random_in_range(100_000)])


@pytest.fixture(scope='module')
def codes(values):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, values.size, dtype=np.uint8)
    codes[:100_000] &= 0xBF  # a chunk that is all finite has its own loops
    return codes


# -- the GPU's compiler -------------------------------------------------------

@pytest.mark.parametrize('architecture', ['sm_80', 'sm_90'])
@pytest.mark.parametrize(
    'kernel', compilers.all_kernels(), ids=lambda kernel: kernel.name)
def test_the_gpu_compiler_takes_every_kernel(nvrtc, kernel, architecture):
    ptx = nvrtc.ptx(compilers.cuda_source(kernel), architecture)
    assert f'.entry {kernel.name}' in ptx
    # Contraction, flushing and approximate division would change bits.
    assert not re.search(r'fma\.|\.ftz|div\.(full|approx)|\.f64', ptx)


def test_a_kernel_that_does_not_compile_is_noticed(nvrtc):
    broken = kernels.decode()._replace(operation='value = e5m2_decod(code);')
    with pytest.raises(RuntimeError, match='e5m2_decod'):
        nvrtc.ptx(compilers.cuda_source(broken), 'sm_80')


# -- the same text on the CPU -------------------------------------------------

@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_encode_gives_the_bits_of_the_cpu(host, values, rounding):
    expected, out = np.zeros((2, values.size), np.uint8)
    fp8.encode(values, expected, rounding=rounding, seed=SEED)
    host[f'e5m2_encode_{rounding}'](values, *compilers.keys(SEED), out)
    assert np.array_equal(out, expected)


def test_decode_gives_the_bits_of_the_cpu(host, codes):
    expected, out = np.zeros((2, codes.size), np.float32)
    fp8.decode(codes, expected)
    host['e5m2_decode_codes'](codes, out)
    assert reference.same_bits(out, expected)


@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_add_gives_the_bits_of_the_cpu(host, codes, rounding):
    expected, out = np.zeros((2, codes.size), np.uint8)
    other = codes[::-1].copy()
    fp8.add(codes, other, expected, rounding=rounding, seed=SEED)
    host[f'e5m2_add_{rounding}'](codes, other, *compilers.keys(SEED), out)
    assert np.array_equal(out, expected)


def test_accumulate_gives_the_bits_of_the_cpu(host, codes, values):
    expected, total = values.copy(), values.copy()
    fp8.accumulate(codes, expected)
    host['e5m2_accumulate_codes'](codes, total)
    assert reference.same_bits(total, expected)


@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
@pytest.mark.parametrize('scale', [1.0, 1e4])
def test_ratio_encode_gives_the_bits_of_the_cpu(
        host, values, rounding, scale):
    parameter = values[::-1].copy()
    expected, out, flags = np.zeros((3, values.size), np.uint8)
    counts = fp8.ratio_encode(
        values, parameter, expected, scale=scale, rounding=rounding,
        seed=SEED)
    host[f'e5m2_ratio_encode_{rounding}'](
        values, parameter, scale, 1e-5, *compilers.keys(SEED), out, flags)
    assert np.array_equal(out, expected)
    assert ((flags == 1).sum(), (flags == 2).sum()) == counts
    assert flags.max() == 2


@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_ratio_feedback_gives_the_bits_of_the_cpu(host, values, rounding):
    parameter = values[::-1].copy()
    expected, out, flags = np.zeros((3, values.size), np.uint8)
    rng = np.random.default_rng(0)
    residual = rng.standard_normal(values.size, dtype=np.float32)
    expected_residual = residual.copy()
    scale = 3.0
    counts = fp8.ratio_encode(
        values, parameter, expected, scale=scale, residual=expected_residual,
        rounding=rounding, seed=SEED)
    host[f'e5m2_ratio_feedback_{rounding}'](
        values, parameter, scale, np.float32(1) / np.float32(scale), 1e-5,
        *compilers.keys(SEED), out, flags, residual)
    assert np.array_equal(out, expected)
    assert reference.same_bits(residual, expected_residual)
    assert ((flags == 1).sum(), (flags == 2).sum()) == counts


@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
def test_ratio_decode_gives_the_bits_of_the_cpu(host, values, codes, dtype):
    wire = codes if dtype == 'uint8' else values[::-1].copy()
    expected, out = np.zeros((2, values.size), np.float32)
    fp8.ratio_decode(wire, values, expected, scale=3.0)
    host[f'e5m2_ratio_decode_{dtype}'](
        wire, values, np.float32(1) / np.float32(3), 1e-5, out)
    assert reference.same_bits(out, expected)
