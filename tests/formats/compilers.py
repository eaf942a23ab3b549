"""Compiles kernels as the GPU's compiler would, and for the CPU.

A kernel is wrapped as CuPy's ``ElementwiseKernel`` wraps it: what it calls raw
are pointers, and the rest are numbers.
"""
import ctypes
import ctypes.util
import importlib.util
import pathlib
import shutil
import subprocess

from chainer_fp8pipe.formats import gpu

import numpy
import pytest

C_TYPES = {
    'float32': 'float', 'uint8': 'unsigned char', 'int32': 'int',
    'int64': 'long long'}

#: As the project's own build, less the optimisation that finds the vectors.
FLAGS = ['-O2', '-ffp-contract=off', '-fno-trapping-math', '-Wall', '-Werror',
         '-fPIC', '-shared']


def parameters(kernel):
    """(dtype, name, is raw) of every parameter in the order of the call."""
    found = []
    for part in f'{kernel.in_params}, {kernel.out_params}'.split(','):
        *raw, dtype, name = part.split()
        found.append((dtype, name, bool(raw)))
    return found


def _signature(kernel):
    inputs = len(kernel.in_params.split(','))
    return ', '.join([
        *('const ' * (index < inputs) + C_TYPES[dtype] + ' *' * raw
          + f' {name}' for index, (dtype, name, raw)
          in enumerate(parameters(kernel))), 'long long _n'])


def cuda_source(name, kernel):
    return f'''{gpu.preamble()}
extern "C" __global__ void fp8pipe_{name}({_signature(kernel)}) {{
  long long i = blockDim.x * (long long)blockIdx.x + threadIdx.x;
  if (i < _n) {{ {kernel.operation}; }}
}}'''


def cpp_source(name, kernel):
    return f'''
extern "C" void fp8pipe_{name}({_signature(kernel)}) {{
  for (long long i = 0; i < _n; ++i) {{ {kernel.operation}; }}
}}'''


class HostKernel:
    """A kernel's text, compiled by the C++ compiler for this processor."""

    def __init__(self, library, name, kernel):
        self._function = getattr(library, f'fp8pipe_{name}')
        self._parameters = parameters(kernel)

    def __call__(self, *args, size):
        values = []
        for (dtype, _, raw), arg in zip(self._parameters, args, strict=True):
            assert numpy.dtype(dtype) == arg.dtype
            values.append(ctypes.c_void_p(arg.ctypes.data) if raw else {
                'float32': ctypes.c_float, 'int32': ctypes.c_int}[dtype](arg))
        self._function(*values, ctypes.c_longlong(size))


def host_kernels(folder):
    """Every kernel by name; skips the test where there is no C++ compiler."""
    compiler = shutil.which('c++') or shutil.which('g++')
    if compiler is None:
        pytest.skip('no C++ compiler (c++ or g++)')
    source = pathlib.Path(folder, 'kernels.cpp')
    source.write_text(gpu.preamble() + ''.join(
        cpp_source(*item) for item in gpu.KERNELS.items()))
    library = source.with_suffix('.so')
    subprocess.run(
        [compiler, *FLAGS, str(source), '-o', str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    return {name: HostKernel(loaded, name, kernel)
            for name, kernel in gpu.KERNELS.items()}


class Nvrtc:
    """NVIDIA's run-time compiler, from its package or the system."""

    def __init__(self):
        self._library = ctypes.CDLL(_nvrtc_path())
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def ptx(self, source, architecture):
        """Compiles; returns PTX or raises ``RuntimeError`` with the log."""
        program = ctypes.c_void_p()
        self._check(self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b'kernel.cu', 0, None,
            None))
        options = [f'--gpu-architecture={architecture}', *gpu.OPTIONS]
        array = (ctypes.c_char_p * len(options))(
            *(option.encode() for option in options))
        status = self._library.nvrtcCompileProgram(
            program, len(options), array)
        if status:
            raise RuntimeError(self._text(program, 'ProgramLog'))
        return self._text(program, 'PTX')

    def _text(self, program, what):
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f'nvrtcGet{what}Size')(
            program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f'nvrtcGet{what}')(
            program, buffer))
        return buffer.value.decode()

    def _check(self, status):
        if status:
            raise RuntimeError(
                self._library.nvrtcGetErrorString(status).decode())


def _nvrtc_path():
    """Skips the test where there is no NVRTC."""
    packages = importlib.util.find_spec('nvidia')
    for place in packages.submodule_search_locations if packages else ():
        for path in sorted(pathlib.Path(place).glob('*/lib/libnvrtc.so.*')):
            return str(path)
    path = ctypes.util.find_library('nvrtc')
    if path is None:
        pytest.skip('no NVRTC (pip install nvidia-cuda-nvrtc)')
    return path
