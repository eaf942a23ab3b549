"""The GPU's kernels of records, compiled for this processor."""
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile

from chainer_fp8pipe.block_formats import record_kernels

import numpy as np
import pytest

from tests.fp8.compilers import FLAGS

OPERATIONS = {
    'encode_alone': ('float *', 'float', 'unsigned char *', 'long long'),
    'encode_feedback': ('float *', 'float', 'float *', 'unsigned char *',
                        'long long'),
    'decode': ('unsigned char *', 'float', 'float *', 'long long'),
    'accumulate': ('unsigned char *', 'float', 'float *', 'long long')}

#: By the type of a parameter: what an argument is, and for ctypes.
_KINDS = {'float *': (np.float32, ctypes.c_void_p),
          'unsigned char *': (np.uint8, ctypes.c_void_p),
          'float': (np.float32, ctypes.c_float),
          'long long': (np.int64, ctypes.c_longlong)}

#: Name and types of parameters of every kernel.
KERNELS = {record_kernels.name(operation, number): types
           for operation, types in OPERATIONS.items() for number in range(3)}


def _launcher(name, types):
    """C++ that takes the grid before what the kernel takes."""
    members = ' '.join(f'{kind} p{place};' for place, kind in enumerate(types))
    taken = ', '.join(f'{kind} p{place}' for place, kind in enumerate(types))
    own = ', '.join(f'p{place}' for place in range(len(types)))
    passed = ', '.join(f'of->p{place}' for place in range(len(types)))
    return f'''
struct Of_{name} {{ {members} }};
static void thread_{name}(void *given)
{{
    Of_{name} *of = (Of_{name} *)given;
    {name}({passed});
}}
extern "C" int run_{name}(unsigned int blocks, unsigned int threads, {taken})
{{
    Of_{name} of = {{{own}}};
    return run_grid(blocks, threads, thread_{name}, &of);
}}'''


def source(kernels):
    """Kernels' text, between what CUDA has and launchers."""
    simulated = pathlib.Path(__file__).with_name('simulated_gpu.h')
    text = kernels.replace('extern "C" __global__', '__global__')
    return '\n'.join([simulated.read_text(), text, *(
        _launcher(name, types) for name, types in KERNELS.items())])


@functools.cache
def _library(kernels):
    compiler = shutil.which('c++') or shutil.which('g++')
    if compiler is None:
        pytest.skip('no C++ compiler (c++ or g++)')
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, 'kernels.cpp')
        path.write_text(source(kernels))
        subprocess.run([compiler, *FLAGS, str(path), '-o',
                        str(path.with_suffix('.so'))], check=True)
        return ctypes.CDLL(str(path.with_suffix('.so')))    # stays loaded


def launch(name, grid, block, arguments, kernels=None):
    """Runs a kernel on NumPy arrays, as ``cupy.RawKernel`` is called."""
    values = []
    for kind, argument in zip(KERNELS[name], arguments, strict=True):
        dtype, made = _KINDS[kind]
        assert argument.dtype == dtype
        values.append(made(argument.ctypes.data if kind.endswith('*')
                           else argument))
    (blocks,), (threads,) = grid, block
    run = _library(kernels or record_kernels.source())[f'run_{name}']
    assert run(blocks, threads, *values), 'threads of a warp have not met'
