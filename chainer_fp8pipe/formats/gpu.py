"""The loops on CuPy arrays: functions as the compiled ones, and their kernels.

Each kernel has the parts of a ``cupy.ElementwiseKernel``, whose preamble is
the text of the headers.  They are data, so that tests can compile and run them
where there is no GPU.  In an operation ``i`` is the index of the element in
the whole array, or of the record.

Kernels run on the current device and stream.  The operations that count
something wait for the device, because they return integers.
"""
from __future__ import annotations

import functools
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from . import FORMATS, RECORD, ROUNDINGS

#: No contraction of a * b + c, so that CPU and GPU give the same bits.
OPTIONS = ('--fmad=false',)

_KEYS = ', uint32 key0, uint32 key1'

# High word of the index first shifted as 64 bits: i may be a 32-bit integer.
_RANDOM = (
    'e5m2_random((unsigned int)i, (unsigned int)((long long)i >> 32), '
    'key0, key1)')


class Kernel(NamedTuple):
    """One kernel; parameters are ``'dtype name, raw dtype name'``.

    Attributes:
        name: Of the kernel.
        in_params: Its inputs.
        out_params: What it writes; a residual is read, too.
        operation: C++ for one element or record.
    """

    name: str
    in_params: str
    out_params: str
    operation: str


@functools.cache
def preamble() -> str:
    """The arithmetic of one element and of one record: the headers."""
    folder = resources.files(__package__)
    return ''.join(folder.joinpath(f'{name}.h').read_text(encoding='utf-8')
                   for name in ('e5m2', 'records'))


def _kernels() -> dict[str, Kernel]:
    found = [
        Kernel('decode', 'uint8 code', 'float32 value',
               'value = e5m2_decode(code);'),
        Kernel('accumulate', 'uint8 code', 'float32 total',
               'total = e5m2_accumulate(total, code);')]
    # `flags` is 1 if an element clipped, 2 if it is not finite: whatever is
    # not finite counts as large, too.
    for number, rounding in enumerate(ROUNDINGS):
        found += [
            Kernel(f'encode_{rounding}', f'float32 value{_KEYS}',
                   'uint8 code',
                   f'code = e5m2_encode(value, {number}, {_RANDOM});'),
            Kernel(f'add_{rounding}', f'uint8 a, uint8 b{_KEYS}',
                   'uint8 sum', f'sum = e5m2_add(a, b, {number}, {_RANDOM});'),
            Kernel(f'ratio_encode_{rounding}',
                   'float32 gradient, float32 parameter, float32 scale, '
                   f'float32 epsilon{_KEYS}', 'uint8 code, uint8 flags', f'''
        float weight = e5m2_weight(parameter, epsilon);
        float ratio = e5m2_ratio(gradient, weight, scale);
        code = e5m2_encode_ratio(ratio, gradient, {number}, {_RANDOM});
        flags = e5m2_is_large(ratio) + e5m2_is_nonfinite(ratio, gradient);
        '''),
            Kernel(f'ratio_feedback_{rounding}',
                   'float32 gradient, float32 parameter, float32 scale, '
                   f'float32 inverse, float32 epsilon, float32 bound{_KEYS}',
                   'uint8 code, uint8 flags, float32 residual', f'''
        float value = gradient + residual;
        float weight = e5m2_weight(parameter, epsilon);
        float ratio = e5m2_ratio(value, weight, scale);
        code = e5m2_encode_ratio(ratio, value, {number}, {_RANDOM});
        flags = e5m2_is_large(ratio) + e5m2_is_nonfinite(ratio, value);
        residual = e5m2_residual(value, code, weight, inverse, bound);
        ''')]
    for dtype, ratio in (('uint8', 'e5m2_decode(wire)'), ('float32', 'wire')):
        found.append(Kernel(
            f'ratio_decode_{dtype}', f'{dtype} wire, float32 parameter, '
            'float32 inverse, float32 epsilon', 'float32 gradient', f'''
        float weight = e5m2_weight(parameter, epsilon);
        gradient = e5m2_from_ratio({ratio}, weight, inverse);
        '''))
    where = f'''
        long long first = (long long)i * {RECORD};
        int there = count - first < {RECORD} ? (int)(count - first) : {RECORD};
        '''
    for name, form in FORMATS.items():
        record = f'&records[(long long)i * {form.nbytes}]'
        for operation, params, residual in (
                ('encode', '', 'nullptr'),
                ('feedback', ', raw float32 residual', '&residual[first]')):
            found.append(Kernel(
                f'{name}_{operation}',
                'raw float32 values, float32 factor, int64 count',
                f'raw uint8 records{params}', f'''{where}
        encode_record(&values[first], factor, {residual}, {record}, there,
                      {name.upper()});
        '''))
        for adds, operation in enumerate(('decode', 'accumulate')):
            found.append(Kernel(
                f'{name}_{operation}',
                'raw uint8 records, float32 factor, int64 count',
                'raw float32 out', f'''{where}
        decode_record({record}, factor, &out[first], there, {adds},
                      {name.upper()});
        '''))
    return {kernel.name: kernel for kernel in found}


#: By name.
KERNELS = _kernels()
_NAMES = tuple(FORMATS)


def run_kernel(name: str, *arguments: Any, **size: int) -> None:
    """Runs a kernel over flat views of its arrays; does not wait for it."""
    import cupy
    _compiled(name)(*(
        argument.reshape(-1) if isinstance(argument, cupy.ndarray)
        else argument for argument in arguments), **size)


@functools.cache
def _compiled(name: str) -> Any:
    import cupy
    kernel = KERNELS[name]
    return cupy.ElementwiseKernel(
        kernel.in_params, kernel.out_params, kernel.operation,
        f'fp8pipe_{name}', preamble=preamble(), options=OPTIONS,
        no_return=True)


# --- as the compiled functions ---------------------------------------------

def encode(values: Any, out: Any, rounding: int, key0: int, key1: int
           ) -> None:
    run_kernel(f'encode_{ROUNDINGS[rounding]}', values, *_keys(key0, key1),
               out)


def decode(codes: Any, out: Any) -> None:
    run_kernel('decode', codes, out)


def add(a: Any, b: Any, out: Any, rounding: int, key0: int, key1: int
        ) -> None:
    run_kernel(f'add_{ROUNDINGS[rounding]}', a, b, *_keys(key0, key1), out)


def accumulate(codes: Any, total: Any) -> None:
    run_kernel('accumulate', codes, total)


def ratio_encode(gradient: Any, parameter: Any, out: Any, residual: Any,
                 scale: float, inverse: float, epsilon: float, bound: float,
                 rounding: int, key0: int, key1: int) -> tuple[int, int]:
    import cupy
    flags = cupy.empty(out.size, np.uint8)
    keys = _keys(key0, key1)
    if residual is None:
        run_kernel(f'ratio_encode_{ROUNDINGS[rounding]}', gradient, parameter,
                   np.float32(scale), np.float32(epsilon), *keys, out, flags)
    else:
        run_kernel(f'ratio_feedback_{ROUNDINGS[rounding]}', gradient,
                   parameter, np.float32(scale), np.float32(inverse),
                   np.float32(epsilon), np.float32(bound), *keys, out, flags,
                   residual)
    return (int(cupy.count_nonzero(flags == 1)),
            int(cupy.count_nonzero(flags == 2)))


def ratio_decode(wire: Any, parameter: Any, out: Any, inverse: float,
                 epsilon: float) -> int:
    import cupy
    run_kernel(f'ratio_decode_{wire.dtype.name}', wire, parameter,
               np.float32(inverse), np.float32(epsilon), out)
    return out.size - int(cupy.count_nonzero(cupy.isfinite(out)))


def records_encode(values: Any, factor: float, residual: Any, records: Any,
                   number: int) -> int:
    name, kept = (('encode', []) if residual is None
                  else ('feedback', [residual]))
    run_kernel(f'{_NAMES[number]}_{name}', values, np.float32(factor),
               np.int64(values.size), records, *kept, size=records.shape[0])
    return _nonfinite(records)


def records_decode(records: Any, factor: float, out: Any, adds: bool,
                   number: int) -> int:
    name = 'accumulate' if adds else 'decode'
    run_kernel(f'{_NAMES[number]}_{name}', records, np.float32(factor),
               np.int64(out.size), out, size=records.shape[0])
    return 0 if adds else _nonfinite(records)


def _nonfinite(records: Any) -> int:
    import cupy
    return int(cupy.count_nonzero(records[:, -1] == 255))


def _keys(key0: int, key1: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key0), np.uint32(key1)
