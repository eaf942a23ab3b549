"""Checks of array arguments, and the choice between CPU and GPU loops."""
from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from . import _loops

FLOAT = np.dtype(np.float32)
CODE = np.dtype(np.uint8)

Arrays = Mapping[str, Any]


def loops_for(floats: Arrays, codes: Arrays, *, written: Collection[str],
              in_place: Collection[str] = ()) -> ModuleType:
    """Checks the arguments of an operation and returns its loops.

    Args:
        floats: The float32 arguments by name.
        codes: The uint8 arguments by name.
        written: Names of the arguments that the operation writes.
        in_place: Names of inputs that may be the very array that is written.

    Returns:
        The compiled loops for NumPy arrays, :mod:`.gpu` for CuPy arrays;
        both have the same functions.
    """
    arrays = {**floats, **codes}
    on_gpu = are_on_gpu(arrays)
    for group, dtype in ((floats, FLOAT), (codes, CODE)):
        for name, array in group.items():
            _check_layout(name, array, dtype)
    _check_sizes(arrays)
    for name in written:
        if not on_gpu and not arrays[name].flags.writeable:
            raise ValueError(f'{name} is written, but it is read-only')
        _check_overlap(name, arrays, in_place, on_gpu)
    if not on_gpu:
        return _loops
    from . import gpu  # needs CuPy
    return gpu


def is_cupy(array: object) -> bool:
    """Whether this is a CuPy array; imports nothing."""
    cupy = sys.modules.get('cupy')
    return cupy is not None and isinstance(array, cupy.ndarray)


def are_on_gpu(arrays: Arrays) -> bool:
    """Whether all are CuPy arrays; TypeError unless all are of one kind."""
    on_gpu = []
    for name, array in arrays.items():
        if is_cupy(array):
            on_gpu.append(name)
        elif not isinstance(array, np.ndarray):
            raise TypeError(
                f'{name} must be a NumPy or CuPy array, '
                f'not {type(array).__name__}')
    if on_gpu and len(on_gpu) < len(arrays):
        on_cpu = [name for name in arrays if name not in on_gpu]
        raise TypeError(
            'arrays must be all on the CPU or all on the GPU, but '
            f'{", ".join(on_cpu)} is NumPy and {", ".join(on_gpu)} is CuPy')
    return bool(on_gpu)


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays of one kind, both C-contiguous, overlap."""
    if not is_cupy(a):
        return np.may_share_memory(a, b)
    start, other = _address(a, True), _address(b, True)
    return start < other + b.nbytes and other < start + a.nbytes


def _check_layout(name: str, array: Any, dtype: np.dtype) -> None:
    if array.dtype != dtype:
        raise TypeError(f'{name} has dtype {array.dtype}, expected {dtype}')
    if not array.flags.c_contiguous:
        raise ValueError(
            f'{name} ({array.dtype}, shape {array.shape}) must be '
            'C-contiguous')


def _check_sizes(arrays: Arrays) -> None:
    if len({array.size for array in arrays.values()}) > 1:
        sizes = ', '.join(
            f'{name} has {array.size}' for name, array in arrays.items())
        raise ValueError(f'arrays must have the same size, but {sizes}')


def _check_overlap(written: str, arrays: Arrays, in_place: Collection[str],
                   on_gpu: bool) -> None:
    out = arrays[written]
    for name, array in arrays.items():
        if (name != written and may_share_memory(out, array)
                and not (name in in_place and _is_same(out, array, on_gpu))):
            raise ValueError(f'{written} shares memory with {name}')


def _is_same(a: Any, b: Any, on_gpu: bool) -> bool:
    return (a.nbytes == b.nbytes
            and _address(a, on_gpu) == _address(b, on_gpu))


def _address(array: Any, on_gpu: bool) -> int:
    interface = (array.__cuda_array_interface__ if on_gpu
                 else array.__array_interface__)
    return interface['data'][0]
