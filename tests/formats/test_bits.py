"""Every format's bits, on each backend, against others' implementations.

Backends are compiled C, and the GPU's kernels, compiled for the CPU.
"""
import math
import re

from chainer_fp8pipe.codecs import (
    BlockScaled,
    Cast,
    Fp8Paper,
    Fp8Ratio,
    Tensors,
)
from chainer_fp8pipe.formats import gpu

import ml_dtypes
import numpy as np
import pytest

from tests.codecs.fake_cupy import installed, on_host
from tests.codecs.helpers import CODECS

from . import compilers, int4_reference, reference

EPSILON = np.float32(1e-5)

pytestmark = pytest.mark.filterwarnings(
    'ignore:.*encountered in:RuntimeWarning')


@pytest.fixture(params=[on_host, installed], ids=['C', 'kernel'])
def place(request):
    with request.param() as place:
        yield place


def values():
    rng = np.random.default_rng(0)
    return np.concatenate([
        reference.interesting_floats(), reference.random_bits(100_000),
        reference.random_in_range(100_001),
        rng.normal(size=1000).astype('f')])


def any_parameters(size):
    rng = np.random.default_rng(1)
    found = rng.normal(0, .1, size).astype('f')
    found[::7] = 0
    found[::1001] = np.inf
    found[::1003] = np.nan
    found[::1005] = 1e-40
    return found


def coded(place, codec, gradients, parameters, largest=None, steps=1):
    """The wire, what is left out, what is decoded, and what is counted.

    In three tensors of which one is empty; gradients are sent `steps` times.
    """
    state, cuts = codec.init(), [0, 33, 33, gradients.size]
    parts = [slice(*cuts[i:i + 2]) for i in range(3)]
    for _ in range(steps):
        made = [[place(array[part].copy()) for part in parts]
                for array in (gradients, parameters)]
        tensors = Tensors('abc', *made, grain=codec.grain)
        codec.begin(state, 1.0)
        codec.step(state, tensors, largest)
        wire = np.zeros(tensors.size, codec.wire_dtype)
        tensors.encode(wire)
        left = [state.residual(
            tensors.xp, 'gradient', name, 0, array.size)[0]
            for name, array in zip('abc', made[0], strict=True)
            ] if codec.error_feedback else []
        if place is np.asarray:
            tensors.decode_into(tensors.gradients)
        bad = tensors.decode(wire)
        tensors.conclude()
    back = [[array if isinstance(array, np.ndarray) else array.get()
             for array in arrays] for arrays in (left, tensors.gradients)]
    return (wire, *(np.concatenate(arrays) if arrays else None
                    for arrays in back),
            (bad, state.nonfinite, state.numbers, state.take_largest()))


def bits(array):
    """A processor's own NaN, as of infinity times zero, is any NaN."""
    return np.where(np.isnan(array), np.float32(np.nan), array).view('u4')


def test_fp8_by_ratio_is_ml_dtypes_with_error_feedback(place):
    gradients = values()
    parameters = any_parameters(gradients.size)
    largest = np.array([3, 5, 2, 1e3, 1e3, 1e3], 'f')
    codec, start = Fp8Ratio(), 33
    wire, left, decoded, _ = coded(place, codec, gradients, parameters,
                                   largest, steps=2)
    scale = np.float32(57344 / (2 * codec.room))
    inverse = np.float32(1) / scale
    residual = np.zeros(gradients.size - start, 'f')
    weight = abs(parameters[start:]) + EPSILON
    for _ in range(2):
        wanted = gradients[start:] + residual
        ratio = wanted / weight * scale
        expected = reference.nearest(np.where(
            np.isinf(ratio) & np.isfinite(wanted),
            np.copysign(np.float32(1e30), ratio), ratio))
        expected[np.isinf(wanted) & ~np.isnan(ratio)] = np.where(
            ratio > 0, 0x7C, 0xFC)[np.isinf(wanted) & ~np.isnan(ratio)]
        expected[np.isnan(ratio)] = expected[np.isnan(ratio)] & 0x80 | 0x7E
        back = reference.decode(expected) * inverse * weight
        residual = wanted - back
        residual = np.where(abs(residual) <= 1e3, residual, np.float32(0))
    ok = ~np.isnan(ratio)       # a NaN's sign is the processor's
    np.testing.assert_array_equal(wire[start:][ok], expected[ok])
    np.testing.assert_array_equal(wire[start:][~ok] & 0x7F, 0x7E)
    np.testing.assert_array_equal(bits(decoded[start:]), bits(back))
    np.testing.assert_array_equal(left[start:], residual)


def test_the_papers_truncation_is_numpys(place):
    gradients = values()
    parameters = np.ones(gradients.size, 'f')
    wire, *_ = coded(place, Fp8Paper(epsilon=1e-30), gradients, parameters,
                     np.array([57344.0] * 3 + [0] * 3, 'f'))
    np.testing.assert_array_equal(
        wire & 0x7F, reference.truncate(gradients) & 0x7F)
    ok = ~np.isnan(gradients)
    np.testing.assert_array_equal(wire[ok], reference.truncate(gradients)[ok])


def test_int4_is_numpys_with_error_feedback(place):
    gradients = int4_reference.interesting()
    wire, left, decoded, _ = coded(place, BlockScaled(), gradients,
                                   np.ones(gradients.size, 'f'))
    found = wire.view('u1').reshape(-1, 17)
    for part, rows in ((slice(33), found[:2]), (slice(33, None), found[2:])):
        expected, kept = int4_reference.encode(gradients[part])
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(left[part], kept)
        np.testing.assert_array_equal(decoded[part], int4_reference.decode(
            expected, gradients[part].size))


@pytest.mark.parametrize('name', ['float32', 'float16', 'bfloat16'])
def test_a_cast_is_others(place, name):
    gradients, dtype = values(), getattr(ml_dtypes, name, name)
    wire, _, decoded, _ = coded(place, Cast(name), gradients, gradients)
    expected = gradients.astype(dtype)
    ok = ~np.isnan(gradients)
    np.testing.assert_array_equal(wire.view(dtype)[ok], expected[ok])
    np.testing.assert_array_equal(bits(decoded), bits(expected.astype('f')))


@pytest.mark.parametrize('codec', CODECS.values(), ids=[*CODECS])
@pytest.mark.parametrize('kind', ['normal', 'large', 'nan', 'parameter'])
def test_what_is_found_is_the_same_everywhere(codec, kind):
    rng = np.random.default_rng(0)
    gradients, parameters = rng.normal(size=(2, 3000)).astype('f')
    gradients[100] = {'large': 1e37, 'nan': np.nan}.get(kind, 1)
    parameters[200] = np.nan if kind == 'parameter' else 1
    largest = np.array([3, 5, 2, 10, 10, 10], 'f') if (
        isinstance(codec, Fp8Ratio)) else None
    found = []
    for made in on_host, installed:
        with made() as place:
            found.append(coded(place, codec, gradients, parameters,
                               largest)[3])
    np.testing.assert_equal(*found)
    bad, nonfinite, numbers, seen = found[0]
    fp8 = isinstance(codec, Fp8Ratio)
    assert bad == (['c'] if kind == 'nan' or kind == 'parameter' and fp8
                   or kind == 'large' and codec == Cast('float16') else [])
    assert bool(nonfinite) == bool(bad)
    if fp8:
        assert numbers['clipped']['c'] > 0 or kind != 'large'
        assert math.isfinite(seen['c']) != bool(bad)


def test_the_largest_ratio_is_of_what_is_finite(place):
    gradients = np.array([1, -3, np.nan, np.inf, 0, 1e38], 'f')
    parameters = np.array([0, .1, 0, 0, np.nan, 0], 'f')
    for stop, expected in ((2, (1 / EPSILON, 3)), (4, (1 / EPSILON, 3)),
                           (6, (np.inf, np.float32(1e38)))):
        tensors = Tensors('a', [place(gradients[:stop].copy())],
                          [place(parameters[:stop].copy())])
        (found, size), = tensors.largest([0], 1e-5)
        assert (found, size) == (pytest.approx(expected[0]), expected[1])


def test_a_bucket_takes_a_launch_each_way():
    with installed() as place:
        import cupy
        rng = np.random.default_rng(0)
        for codec in CODECS.values():
            state = codec.init()
            names = [f'/{k}' for k in range(161)]
            made = [[place(rng.normal(size=k + 1).astype('f'))
                     for k in range(161)] for _ in range(2)]
            tensors = Tensors(names, *made, grain=codec.grain)
            codec.begin(state, 1.0)
            codec.step(state, tensors, codec.propose(state, tensors))
            wire, before = np.empty(
                tensors.size, codec.wire_dtype), cupy.launches
            tensors.encode(wire)
            tensors.decode(wire)
            assert cupy.launches == before + 2


@pytest.mark.parametrize('name', gpu.KERNELS)
def test_the_gpus_compiler_takes_the_kernels(name):
    nvrtc = compilers.Nvrtc()
    ptx = nvrtc.ptx(compilers.cuda_source(name, gpu.KERNELS[name]),
                    'compute_80')
    assert not re.search(r'\bfma\.rn\.f32', re.sub(
        r'div\.rn\.f32', '', ptx))
    assert '.local' not in ptx or 'int4' in name


def test_cupys_own_source_of_the_kernels_compiles():
    """CuPy's wheel imports without a GPU, and writes what it would compile."""
    cupy = pytest.importorskip('cupy', reason='CuPy is not installed')
    for name in gpu.KERNELS:
        made = gpu.kernel.__wrapped__(name)
        assert isinstance(made, cupy.ElementwiseKernel)
        assert [param.name for param in made.params][-1] == 'found'
