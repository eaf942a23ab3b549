"""Number formats of 16, 8 and 4 bits, and loops over them, on CPU and GPU.

``fp8`` (E5M2) has one byte per element: the upper one of an IEEE half.  Finite
values saturate at ``MAX``; NaN and infinity stay what they are.

``int4`` has records of 32 elements of 4 bits, -7 to 7 times a scale of one
byte, 6 bits of exponent and 2 of mantissa, rounded up: 17 bytes, 4.25 bits
per element.  An array's last record may hold fewer.  A record that holds a
NaN or an infinity has NaN only.

The functions here are fp8's, for NumPy arrays.  Gradients go through
:class:`.codecs.Tensors`, which has all formats, on the CPU and on the GPU,
with the same bits.

Functions raise TypeError for an argument of another dtype, that is not
C-contiguous or, where it is written, read-only, and ValueError for sizes that
do not fit and roundings that there are not.
"""
# One text gives the bits on both processors: e5m2.h and int4.h have one
# element's (or record's) arithmetic, without branches and tables.  The C
# compiler includes them for the loops of loops.h, and CuPy compiles them as
# the preamble of element-wise kernels (gpu.py).  The bits agree as long as no
# a * b + c is contracted (-ffp-contract=off, --fmad=false).
#
# Compiled parts are libraries of C functions, called by ctypes without the
# interpreter's lock.  Their structs are tables of NumPy's, whose owner keeps
# them, and all that has its address there, as long as compiled code works.
from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

import numpy as np

__all__ = ['MAX', 'RECORD', 'RECORD_BYTES', 'ROUNDINGS', 'decode', 'encode',
           'library', 'with_inverse']

#: The largest finite value of fp8.
MAX = 57344.0

#: Names of fp8's roundings; their order is that of the header's numbers.
ROUNDINGS = ('nearest', 'truncate')

#: Elements of int4 that share a scale, and bytes that they take with it.
RECORD, RECORD_BYTES = 32, 17


@functools.cache
def library(name: str = 'formats._formats', python: bool = False) -> Any:
    """A module of compiled code; ``python``: which uses objects of Python.

    Raises:
        ImportError: It is missing; the message says how to build it.
    """
    name = f'{__name__.partition(".")[0]}.{name}'
    found = importlib.util.find_spec(name)
    return (ctypes.PyDLL if python else ctypes.CDLL)(
        found and found.origin or importlib.import_module(name).origin)


def encode(values: Any, out: Any, *, rounding: str = 'nearest') -> None:
    """Rounds float32 values to fp8 codes.

    Args:
        values: float32 array.
        out: uint8 array for the codes, of the same size.
        rounding: ``'nearest'`` (ties to even, in one step from float32) or
            ``'truncate'`` (the upper byte of the nearest IEEE half).
    """
    if rounding not in ROUNDINGS:
        raise ValueError(
            f'rounding is {rounding!r}, expected one of {ROUNDINGS}')
    _call('encode_codes', values, out, rounding=ROUNDINGS.index(rounding))


def decode(codes: Any, out: Any) -> None:
    """Writes the values of fp8 codes; exact.

    Args:
        codes: uint8 array.
        out: float32 array for the values, of the same size.
    """
    _call('decode_codes', codes, out)


@functools.cache
def _array(dtype: type, *flags: Any) -> Any:
    return np.ctypeslib.ndpointer(dtype, flags=('C_CONTIGUOUS', *flags))


def _call(function: str, read: Any, written: Any, **numbers: int) -> None:
    types = (np.float32, np.uint8)[::1 if numbers else -1]
    arrays = (_array(types[0]).from_param(read),
              _array(types[1], 'WRITEABLE').from_param(written))
    if read.size != written.size:
        raise ValueError('arrays must have the same size, but have '
                         f'{read.size} and {written.size}')
    getattr(library(), function)(
        *arrays, ctypes.c_size_t(read.size), *numbers.values())


def with_inverse(scales: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Scales and their inverses in float32, in the shape of ``scales``.

    Raises:
        ValueError: A scale is not positive, or one of them is not finite.
    """
    with np.errstate(over='ignore', under='ignore', divide='ignore'):
        factors = np.asarray(scales).astype(np.float32)
        inverses = np.float32(1) / factors
    good = ((factors > 0) & (inverses > 0)
            & np.isfinite(factors) & np.isfinite(inverses))
    if not good.all():
        raise ValueError(
            f'scale is {np.asarray(scales)[~good].flat[0]!r}, expected a '
            'positive number that is finite in float32, as is its inverse')
    return factors, inverses
