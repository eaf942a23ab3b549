"""As much of CuPy as the codecs use, on the CPU.

Its arrays cannot be mixed with NumPy's, as CuPy's cannot, and its kernels
are the GPU kernels' own text, compiled for this processor.  So the way of a
gradient through the device can be tested where there is no GPU.
"""
import contextlib
import functools
import sys
import tempfile
import types

from chainer_fp8pipe.formats import gpu

import numpy
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.formats.compilers import host_kernels


class ndarray(NDArrayOperatorsMixin):
    """An array "on the device": NumPy functions on it raise, as on CuPy's.

    (CuPy's own take part in universal functions, which is how ``abs`` and
    the operators work.)
    """

    def __init__(self, array):
        assert isinstance(array, numpy.ndarray)
        assert array.dtype.kind != 'V'      # CuPy has no records
        self._array = array

    def __array__(self, *args, **kwargs):
        raise TypeError('Implicit conversion to a NumPy array is not allowed')

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        for value in inputs:
            if isinstance(value, numpy.ndarray) and value.ndim:
                raise TypeError('Unsupported type numpy.ndarray')
        if out is not None:
            kwargs['out'] = tuple(map(_unwrap, out))
        return _wrap(getattr(ufunc, method)(*map(_unwrap, inputs), **kwargs))

    def __getattr__(self, name):
        value = getattr(self._array, name)
        if not isinstance(value, types.BuiltinFunctionType):
            return _wrap(value)
        return lambda *args, **kwargs: _wrap(
            value(*map(_unwrap, args), **kwargs))

    def __getitem__(self, index):
        return _wrap(self._array[_unwrap(index)])

    def __setitem__(self, index, value):
        if isinstance(value, numpy.ndarray):
            raise TypeError('Unsupported type numpy.ndarray')
        self._array[index] = _unwrap(value)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self._array.ctypes.data)

    def get(self, out=None):
        if out is None:
            return self._array.copy()
        assert out.flags.c_contiguous
        assert out.dtype == self.dtype
        out[...] = self._array      # and has waited for it
        return out

    def set(self, array):
        assert array.flags.c_contiguous
        assert (array.dtype, array.shape) == (self.dtype, self.shape)
        _not_there_yet.append((self._array, array))


# Uploads from pinned memory that nobody has waited for.
_not_there_yet = []


def _synchronize():
    for array, pinned in _not_there_yet:
        array[...] = pinned
    _not_there_yet.clear()


def _unwrap(value):
    return value._array if isinstance(value, ndarray) else value


def _wrap(value):
    return ndarray(numpy.asarray(value)) if isinstance(
        value, (numpy.ndarray, numpy.generic)) else value


@functools.cache
def modules():
    """The modules ``cupy`` and ``cupyx``."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = host_kernels(folder)     # stays loaded
    cupy = types.ModuleType('cupy')
    cupy.ndarray, cupy.launches = ndarray, 0

    def elementwise_kernel(in_params, out_params, operation, name, *,
                           preamble, options, no_return):
        name = name.removeprefix('fp8pipe_')
        assert gpu.KERNELS[name] == (in_params, out_params, operation)
        assert (preamble, options) == (gpu.preamble(), ('--fmad=false',))
        assert no_return

        def run(*args, size):
            _synchronize()      # on the stream, behind the copies
            cupy.launches += 1
            compiled[name](*map(_unwrap, args), size=size)
        return run

    cupy.ElementwiseKernel = elementwise_kernel
    for name in ('zeros', 'empty', 'asarray', 'flatnonzero', 'zeros_like'):
        function = getattr(numpy, name)
        setattr(cupy, name, lambda *args, _function=function: _wrap(
            _function(*map(_unwrap, args))))
    cupy.lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(
        as_strided=lambda array, *layout: ndarray(
            numpy.lib.stride_tricks.as_strided(array._array, *layout))))
    ndarray.__int__ = lambda self: int(self._array)
    ndarray.__float__ = lambda self: float(self._array)
    ndarray.__bool__ = lambda self: bool(self._array)
    stream = types.SimpleNamespace(synchronize=_synchronize)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    cupyx = types.ModuleType('cupyx')
    cupyx.empty_pinned = numpy.empty
    return {'cupy': cupy, 'cupyx': cupyx}


#: As :func:`installed`, but arrays stay where they are.
on_host = functools.partial(contextlib.nullcontext, numpy.asarray)


@contextlib.contextmanager
def installed():
    """Stands for CuPy, in a ``with`` block; leaves nothing behind.

    Gives what puts arrays on the device.
    """
    made = modules()
    replaced = {name: sys.modules.pop(name, None) for name in made}
    gpu.kernel.cache_clear()
    sys.modules.update(made)
    try:
        yield ndarray
    finally:
        gpu.kernel.cache_clear()
        for name, module in replaced.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
