"""Number formats of 16, 8 and 4 bits, and loops over them, on CPU and GPU.

``fp8`` (E5M2) has one byte per element: the upper one of an IEEE half.  Finite
values saturate at ``MAX``; NaN and infinity stay what they are.

``int4`` has records of 32 elements of 4 bits, -7 to 7 times a scale of one
byte, 6 bits of exponent and 2 of mantissa, rounded up: 17 bytes, 4.25 bits
per element.  An array's last record may hold fewer.  A record that holds a
NaN or an infinity has NaN only.

The functions here are fp8's, for NumPy arrays that are C-contiguous: float32
for values, uint8 for codes.  Gradients go through :class:`.codecs.Tensors`,
which has all formats, on the CPU and on the GPU, with the same bits.

Functions raise TypeError for an argument of another type or dtype.  They
raise ValueError for sizes that do not fit, for arrays that overlap, are
read-only or not C-contiguous, and for values that are not allowed.
"""
# One text gives the bits on both processors: e5m2.h, floats.h and int4.h have
# one element's (or record's) arithmetic, without branches and tables.  The C
# compiler includes them for the loops of loops.h, which it turns into vector
# code; CuPy compiles them as the preamble of element-wise kernels (gpu.py).
# The bits agree as long as no a * b + c is contracted (-ffp-contract=off,
# --fmad=false), and tests compile the kernels' text for the CPU to see it.
#
# What is derived from scales is remembered below: a model has hundreds of
# tensors, whose scales stay for many updates, and to derive it would take
# longer than the loops.
from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import _formats

__all__ = ['MAX', 'RECORD', 'RECORD_BYTES', 'ROUNDINGS', 'TINY', 'add',
           'decode', 'encode', 'with_inverse']

#: The largest finite value of fp8.
MAX = 57344.0

#: The smallest positive value of fp8.
TINY = 2.0 ** -16

#: Names of fp8's roundings; their order is that of the header's numbers.
ROUNDINGS = ('nearest', 'truncate')

#: Elements of int4 that share a scale, and bytes that they take with it.
RECORD, RECORD_BYTES = 32, 17


def encode(values: Any, out: Any, *, rounding: str = 'nearest') -> None:
    """Rounds float32 values to fp8 codes.

    Args:
        values: float32 array.
        out: uint8 array for the codes, of the same size.
        rounding: ``'nearest'`` (ties to even, in one step from float32) or
            ``'truncate'`` (the upper byte of the nearest IEEE half).
    """
    _check({'values': values}, {'out': out}, 'out')
    _formats.encode(values, out, _number(rounding))


def decode(codes: Any, out: Any) -> None:
    """Writes the values of fp8 codes; exact.

    Args:
        codes: uint8 array.
        out: float32 array for the values, of the same size.
    """
    _check({'out': out}, {'codes': codes}, 'out')
    _formats.decode(codes, out)


def add(codes: Any, sums: Any, *, rounding: str = 'nearest') -> None:
    """Adds fp8 codes to others; the sum of two elements is rounded once.

    This is the sum that the fp8 paper runs inside ``MPI_Allreduce``.

    Args:
        codes: uint8 array.
        sums: uint8 array, changed in place.
        rounding: As :func:`encode`.
    """
    _check({}, {'codes': codes, 'sums': sums}, 'sums')
    _formats.add(codes, sums, _number(rounding))


# --- arguments -------------------------------------------------------------

def _number(rounding: str) -> int:
    if rounding not in ROUNDINGS:
        raise ValueError(
            f'rounding is {rounding!r}, expected one of {ROUNDINGS}')
    return ROUNDINGS.index(rounding)


def _check(floats: dict[str, Any], codes: dict[str, Any], written: str
           ) -> None:
    """Checks the arguments of an operation, by name."""
    arrays = {**floats, **codes}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f'{name} must be a NumPy array, '
                            f'not {type(array).__name__}')
        wanted = np.dtype(np.float32 if name in floats else np.uint8)
        if array.dtype != wanted:
            raise TypeError(
                f'{name} has dtype {array.dtype}, expected {wanted}')
        if not array.flags.c_contiguous:
            raise ValueError(f'{name} ({array.dtype}, shape {array.shape}) '
                             'must be C-contiguous')
    if len({array.size for array in arrays.values()}) != 1:
        raise ValueError('arrays must have the same size, but ' + ', '.join(
            f'{name} has {array.size}' for name, array in arrays.items()))
    if not arrays[written].flags.writeable:
        raise ValueError(f'{written} is written, but it is read-only')
    for name, array in arrays.items():
        if name != written and np.may_share_memory(arrays[written], array):
            raise ValueError(f'{written} shares memory with {name}')


@functools.lru_cache(4096)
def with_inverse(scale: float) -> tuple[float, float]:
    """The scale and its inverse as float32 numbers.

    Raises:
        ValueError: The scale is not positive, or one of them is not finite.
    """
    with np.errstate(over='ignore', under='ignore', divide='ignore'):
        factor = np.float32(scale)
        inverse = np.float32(1) / factor
    if not (0 < factor < np.inf and 0 < inverse < np.inf):
        raise ValueError(f'scale is {scale!r}, expected a positive number '
                         'that is finite in float32, as is its inverse')
    return float(factor), float(inverse)
