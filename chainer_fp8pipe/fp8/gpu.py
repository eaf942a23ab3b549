"""The loops on CuPy arrays; the same functions as the compiled ones.

Kernels run on the current device and stream.  The two operations that count
something wait for the device, because they return integers.
"""
from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from . import kernels


def encode(values: Any, out: Any, rounding: int, key0: int, key1: int
           ) -> None:
    run_kernel(kernels.encode(rounding), values, *_keys(key0, key1), out)


def decode(codes: Any, out: Any) -> None:
    run_kernel(kernels.decode(), codes, out)


def add(a: Any, b: Any, out: Any, rounding: int, key0: int, key1: int
        ) -> None:
    run_kernel(kernels.add(rounding), a, b, *_keys(key0, key1), out)


def accumulate(codes: Any, total: Any) -> None:
    run_kernel(kernels.accumulate(), codes, total)


def ratio_encode(gradient: Any, parameter: Any, out: Any, residual: Any,
                 scale: float, inverse: float, epsilon: float, bound: float,
                 rounding: int, key0: int, key1: int) -> tuple[int, int]:
    flags = cupy.empty(out.size, np.uint8)
    keys = _keys(key0, key1)
    if residual is None:
        run_kernel(kernels.ratio_encode(rounding), gradient, parameter,
                   np.float32(scale), np.float32(epsilon), *keys, out, flags)
    else:
        run_kernel(kernels.ratio_feedback(rounding), gradient, parameter,
                   np.float32(scale), np.float32(inverse),
                   np.float32(epsilon), np.float32(bound), *keys, out, flags,
                   residual)
    return (int(cupy.count_nonzero(flags == 1)),
            int(cupy.count_nonzero(flags == 2)))


def ratio_decode(wire: Any, parameter: Any, out: Any, inverse: float,
                 epsilon: float) -> int:
    run_kernel(kernels.ratio_decode(wire.dtype.name), wire, parameter,
               np.float32(inverse), np.float32(epsilon), out)
    return out.size - int(cupy.count_nonzero(cupy.isfinite(out)))


def _keys(key0: int, key1: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key0), np.uint32(key1)


def run_kernel(kernel: kernels.Kernel, *args: Any) -> None:
    """Runs a kernel over flat views of its arrays; does not wait for it."""
    _compiled(kernel)(*(
        arg.reshape(-1) if isinstance(arg, cupy.ndarray) else arg
        for arg in args))


@functools.cache
def _compiled(kernel: kernels.Kernel) -> cupy.ElementwiseKernel:
    return cupy.ElementwiseKernel(
        kernel.in_params, kernel.out_params, kernel.operation, kernel.name,
        preamble=kernels.preamble(), options=kernels.OPTIONS,
        no_return=True)
