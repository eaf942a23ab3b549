"""Compiles kernels as the GPU's compiler would, and for the CPU.

A kernel is wrapped as CuPy's ``ElementwiseKernel`` wraps it: arrays are
parameters called ``_raw_NAME``, of which NAME is the current element; those
that it calls raw are pointers.
"""
import ctypes
import ctypes.util
import importlib.util
import pathlib
import platform
import shutil
import subprocess
import sysconfig

from chainer_fp8pipe import formats
from chainer_fp8pipe.formats import gpu

import numpy
import pytest

C_TYPES = {
    'float32': 'float', 'uint8': 'unsigned char', 'uint32': 'unsigned int',
    'int64': 'long long'}

#: Parameters that are one number, not an array.
SCALARS = {'scale', 'inverse', 'epsilon', 'bound', 'key0', 'key1', 'factor',
           'count'}

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
    signature, elements = [], []
    for index, (dtype, name, raw) in enumerate(parameters(kernel)):
        kind = ('const ' if index < inputs else '') + C_TYPES[dtype]
        if name in SCALARS:
            signature.append(f'{kind} {name}')
        elif raw:
            signature.append(f'{kind} *{name}')
        else:
            signature.append(f'{kind} *_raw_{name}')
            elements.append(f'{kind} &{name} = _raw_{name}[i];')
    return ', '.join([*signature, 'long long _n']), '\n'.join(elements)


def cuda_source(kernel):
    signature, elements = _signature(kernel)
    return f'''{gpu.preamble()}
extern "C" __global__ void fp8pipe_{kernel.name}({signature}) {{
  long long i = blockDim.x * (long long)blockIdx.x + threadIdx.x;
  if (i < _n) {{ {elements}
    {kernel.operation}; }}
}}'''


def cpp_source(kernel):
    signature, elements = _signature(kernel)
    return f'''
extern "C" void fp8pipe_{kernel.name}({signature}) {{
  for (long long i = 0; i < _n; ++i) {{ {elements}
    {kernel.operation}; }}
}}'''


class HostKernel:
    """A kernel's text, compiled by the C++ compiler for this processor."""

    def __init__(self, library, kernel):
        self._function = getattr(library, f'fp8pipe_{kernel.name}')
        self._parameters = parameters(kernel)

    def __call__(self, *args, size=None):
        values = []
        for (dtype, name, raw), arg in zip(self._parameters, args,
                                           strict=True):
            if name not in SCALARS:
                assert arg.dtype == dtype
                values.append(ctypes.c_void_p(arg.ctypes.data))
                size = size if raw else arg.size
            else:
                assert numpy.dtype(dtype).type is type(arg)
                values.append({'float32': ctypes.c_float,
                               'int64': ctypes.c_longlong}.get(
                    dtype, ctypes.c_uint32)(arg))
        self._function(*values, ctypes.c_longlong(size))


def host_kernels(folder):
    """Every kernel by name; skips the test where there is no C++ compiler."""
    compiler = shutil.which('c++') or shutil.which('g++')
    if compiler is None:
        pytest.skip('no C++ compiler (c++ or g++)')
    source = pathlib.Path(folder, 'kernels.cpp')
    source.write_text(gpu.preamble() + ''.join(
        cpp_source(kernel) for kernel in gpu.KERNELS.values()))
    library = source.with_suffix('.so')
    subprocess.run(
        [compiler, *FLAGS, str(source), '-o', str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    return {name: HostKernel(loaded, kernel)
            for name, kernel in gpu.KERNELS.items()}


#: Flags of /proc/cpuinfo that tell the generations of x86-64 apart.
GENERATIONS = {
    'x86-64': set(),
    'x86-64-v3': {'avx2', 'bmi2', 'fma', 'f16c'},
    'x86-64-v4': {'avx512f', 'avx512bw', 'avx512cd', 'avx512dq', 'avx512vl'},
}


def _compiler_for(generation):
    """A C compiler and its options; skips where this processor is older."""
    if platform.machine() != 'x86_64' or platform.system() != 'Linux':
        pytest.skip('needs Linux on x86-64')
    flags = set(pathlib.Path('/proc/cpuinfo').read_text().split())
    if missing := GENERATIONS[generation] - flags:
        pytest.skip(f'this processor lacks {", ".join(sorted(missing))}')
    compiler = shutil.which('cc') or shutil.which('gcc')
    if compiler is None:
        pytest.skip('no C compiler (cc or gcc)')
    return [compiler, '-O3', *FLAGS[1:], f'-march={generation}', '-DCLONES=']


def loops_for(text, folder, generation=None):
    """The module ``_formats`` and the C functions of a text, in one library.

    Built for one generation of x86-64 alone (skips the test where this
    processor is not of it); without one, the loops choose at run time as the
    project's own do.
    """
    command = _compiler_for(generation or 'x86-64')
    if generation is None:
        command.remove('-DCLONES=')
    source = pathlib.Path(folder, 'all.c')
    source.write_text(f'#include "loops.h"\n{text}' if generation is None
                      else f'#include "_formats.c"\n{text}')
    library = source.with_suffix('.so')
    here = pathlib.Path(formats.__file__).parent
    subprocess.run(
        [*command, '-Wno-unused-function', f'-I{here}',
         f'-I{sysconfig.get_path("include")}', str(source), '-o',
         str(library)],
        check=True)
    if generation is None:
        return None, ctypes.CDLL(str(library))
    spec = importlib.util.spec_from_file_location('_formats', library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, ctypes.CDLL(str(library))


def control_register(folder):
    """Functions that get and set the vector unit's modes (MXCSR)."""
    compiler = shutil.which('cc') or shutil.which('gcc')
    if compiler is None or platform.machine() != 'x86_64':
        pytest.skip('needs a C compiler (cc or gcc) and x86-64')
    source, library = (pathlib.Path(folder, name)
                       for name in ('modes.c', 'modes.so'))
    source.write_text(
        'unsigned get(void) { return __builtin_ia32_stmxcsr(); }\n'
        'void set(unsigned modes) { __builtin_ia32_ldmxcsr(modes); }\n')
    subprocess.run(
        [compiler, *FLAGS, str(source), '-o', str(library)], check=True)
    modes = ctypes.CDLL(str(library))
    return modes.get, modes.set


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
