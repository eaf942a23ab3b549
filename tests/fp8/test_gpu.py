"""CuPy arrays: against the CPU bit for bit, and with a stand-in for CuPy."""
import sys
import types

from chainer_fp8pipe import fp8
from chainer_fp8pipe.fp8 import kernels

import numpy as np
import pytest

from . import compilers, reference


class Device:
    """Where arrays go: a module like CuPy, and the ways there and back."""

    def __init__(self, xp, to, back):
        self.xp, self.to, self.back = xp, to, back


@pytest.fixture
def real():
    cupy = pytest.importorskip('cupy', reason='CuPy is not installed')
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f'no CUDA device: {error}')
    if not count:
        pytest.skip('no CUDA device')
    return Device(cupy, cupy.asarray, cupy.asnumpy)


class HostArray(np.ndarray):
    """An array that the stand-in takes for one on a device."""

    __cuda_array_interface__ = property(lambda self: self.__array_interface__)


def stand_in(host):
    """What :mod:`chainer_fp8pipe.fp8.gpu` needs of CuPy, on the CPU."""

    class ElementwiseKernel:
        def __init__(self, in_params, out_params, operation, name, *,
                     preamble, options, no_return):
            kernel = kernels.Kernel(name, in_params, out_params, operation)
            assert kernel in compilers.all_kernels()
            assert preamble == kernels.preamble()
            assert options == ('--fmad=false',)
            assert no_return
            self._run = host[name]

        def __call__(self, *args):
            assert len({arg.shape for arg in args
                        if isinstance(arg, HostArray)}) == 1
            self._run(*args)

    return types.SimpleNamespace(
        ndarray=HostArray, ElementwiseKernel=ElementwiseKernel,
        empty=lambda *args: np.empty(*args).view(HostArray),
        count_nonzero=np.count_nonzero, isfinite=np.isfinite)


@pytest.fixture(scope='module')
def host(tmp_path_factory):
    return compilers.host_kernels(tmp_path_factory.mktemp('kernels'))


@pytest.fixture
def simulated(host, monkeypatch):
    cupy = stand_in(host)
    monkeypatch.setitem(sys.modules, 'cupy', cupy)
    monkeypatch.delitem(
        sys.modules, 'chainer_fp8pipe.fp8.gpu', raising=False)
    if hasattr(fp8, 'gpu'):
        monkeypatch.delattr(fp8, 'gpu')
    yield Device(cupy, lambda array: array.copy().view(HostArray),
                 lambda array: array.view(np.ndarray))
    sys.modules.pop('chainer_fp8pipe.fp8.gpu', None)
    if hasattr(fp8, 'gpu'):
        del fp8.gpu


@pytest.fixture(params=[
    pytest.param('real', marks=pytest.mark.gpu), 'simulated'])
def device(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope='module')
def values():
    return np.concatenate([
        reference.interesting_floats(), reference.random_bits(100_000),
        reference.random_in_range(100_001)])


@pytest.fixture(scope='module')
def codes(values):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, values.size, dtype=np.uint8)


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


@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_encode(device, values, codes, rounding):
    both(device, fp8.encode, {'values': values, 'out': codes},
         rounding=rounding, seed=3)


def test_decode(device, values, codes):
    both(device, fp8.decode, {'codes': codes, 'out': values})


@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_add(device, codes, rounding):
    arrays = {'a': codes, 'b': codes[::-1].copy(), 'out': codes}
    both(device, fp8.add, arrays, rounding=rounding, seed=3)


def test_add_in_place(device, codes):
    expected = np.empty_like(codes)
    fp8.add(codes, codes[::-1].copy(), expected)
    a, b = device.to(codes), device.to(codes[::-1].copy())
    fp8.add(a, b, a)
    assert np.array_equal(device.back(a), expected)


def test_accumulate(device, values, codes):
    both(device, fp8.accumulate, {'codes': codes, 'total': values})


@pytest.mark.parametrize('feedback', [False, True])
@pytest.mark.parametrize('rounding', fp8.ROUNDINGS)
def test_ratio_encode(device, values, codes, rounding, feedback):
    arrays = {
        'gradient': values, 'parameter': values[::-1].copy(), 'out': codes}
    if feedback:
        arrays['residual'] = np.roll(values, 1)
    counts = both(device, fp8.ratio_encode, arrays, scale=3.0,
                  rounding=rounding, seed=3)
    assert counts.clipped > 0
    assert counts.nonfinite > 0


@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
def test_ratio_decode(device, values, codes, dtype):
    arrays = {'wire': codes if dtype == 'uint8' else values,
              'parameter': values, 'out': values}
    assert both(device, fp8.ratio_decode, arrays, scale=3.0) > 0


def test_arrays_may_be_empty_or_have_several_dimensions(device):
    for shape in [(0,), (), (2, 3), (1, 0)]:
        both(device, fp8.encode, {
            'values': np.ones(shape, np.float32),
            'out': np.zeros(shape, np.uint8)})
    both(device, fp8.ratio_encode, {
        'gradient': np.ones((2, 3), np.float32),
        'parameter': np.ones((3, 2), np.float32),
        'out': np.zeros(6, np.uint8)}, scale=1.0)


def test_cpu_and_gpu_arrays_may_not_be_mixed(device):
    with pytest.raises(TypeError, match='out is NumPy and values is CuPy'):
        fp8.encode(device.to(np.ones(2, np.float32)), np.ones(2, np.uint8))


def test_overlap_on_the_device_is_refused(device):
    room = device.to(np.ones(2, np.float32))
    with pytest.raises(ValueError, match='out shares memory with values'):
        fp8.encode(room, room.view(np.uint8)[:2])
