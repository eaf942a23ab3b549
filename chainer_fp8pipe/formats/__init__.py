"""Number formats of 8, 5 and 4 bits, and loops over them, on CPU and GPU.

``fp8`` (E5M2) has one byte per element: the upper one of an IEEE half.  Finite
values saturate at ``MAX``; NaN and infinity stay what they are.  Its
operations are functions (:func:`encode`, ...).

Formats of *records* (:data:`FORMATS`) have 4 or 5 bits per element and one
scale for 32 of them; an array's last record may hold fewer.  Records have 17
bytes (4.25 bits per element) or 21 (5.25 bits):

``int4``
    -7 to 7 times a scale of 6 bits of exponent and 2 of mantissa, rounded up.
``e2m1``
    0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, times a power of two; up to a
    fourth of the largest element is clipped.  The MX formats of the Open
    Compute Project, version 1.0, section 6.3, with another order of bytes.
``int5``
    -15 to 15 times a scale as int4's.

A record that holds a NaN or an infinity, or an element too large for its
scale, has NaN only.

All arrays of a call are NumPy's, or all are CuPy's; the bits are the same.
They are C-contiguous: float32 for values, uint8 for fp8 codes, and records of
the format's ``dtype``, which on the GPU are the rows of a uint8 array.

Operations raise TypeError for an argument of another type or dtype.  They
raise ValueError for sizes that do not fit, for arrays that overlap, are
read-only or not C-contiguous, and for values that are not allowed.
"""
# One text gives the bits on both processors: e5m2.h and records.h have one
# element's (or record's) arithmetic, without branches and tables.  The C
# compiler includes them for the loops of loops.h, which it turns into vector
# code; CuPy compiles them as the preamble of element-wise kernels (gpu.py).
# The bits agree as long as no a * b + c is contracted (-ffp-contract=off,
# --fmad=false), and tests compile the kernels' text for the CPU to see it.
#
# A GPU thread has a whole record.  Eight threads to a record, which exchange
# maxima, would read memory side by side, but would be a second text of the
# same arithmetic.
#
# Random bits are a function of two keys and the element's index (e5m2_random):
# so stochastic rounding needs no state, and a vector may be rounded in pieces,
# by several threads, with the bits of one go.
#
# What is derived from scales and seeds is remembered below: a model has
# hundreds of tensors, whose scales stay for many updates, and to derive it
# would take longer than the loops.
from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import _formats

__all__ = ['FORMATS', 'MAX', 'RECORD', 'ROUNDINGS', 'TINY', 'Counts',
           'RecordFormat', 'accumulate', 'add', 'decode', 'encode',
           'ratio_decode', 'ratio_encode']

#: The largest finite value of fp8.
MAX = 57344.0

#: The smallest positive value of fp8.
TINY = 2.0 ** -16

#: Names of fp8's roundings; their order is that of the header's numbers.
ROUNDINGS = ('nearest', 'truncate', 'stochastic')

#: Elements that share a scale.
RECORD = 32

_FLOAT = np.dtype(np.float32)
_CODE = np.dtype(np.uint8)


class Counts(NamedTuple):
    """What did not fit the format.

    Attributes:
        clipped: Elements whose value was finite and beyond ``MAX``.
        nonfinite: Elements whose code is an infinity or NaN.
    """

    clipped: int
    nonfinite: int


# --- fp8 -------------------------------------------------------------------

def encode(values: Any, out: Any, *, rounding: str = 'nearest', seed: int = 0
           ) -> None:
    """Rounds float32 values to fp8 codes.

    Args:
        values: float32 array.
        out: uint8 array for the codes, of the same size.
        rounding: ``'nearest'`` (ties to even, in one step from float32),
            ``'truncate'`` (the upper byte of the nearest IEEE half) or
            ``'stochastic'`` (up with the probability of the distance from
            below in steps, so that the expectation is the value).
        seed: Any integer; only ``'stochastic'`` uses it.  The same seed
            gives the same codes, on the CPU and on the GPU.
    """
    loops = _loops({'values': values}, {'out': out}, written=['out'])
    loops.encode(values, out, *_rounding(rounding, seed))


def decode(codes: Any, out: Any) -> None:
    """Writes the values of fp8 codes; exact.

    Args:
        codes: uint8 array.
        out: float32 array for the values, of the same size.
    """
    _loops({'out': out}, {'codes': codes}, written=['out']).decode(codes, out)


def add(a: Any, b: Any, out: Any, *, rounding: str = 'nearest', seed: int = 0
        ) -> None:
    """Adds fp8 codes; the sum of two elements is rounded once.

    This is the sum that the fp8 paper runs inside ``MPI_Allreduce``.

    Args:
        a: uint8 array.
        b: uint8 array.
        out: uint8 array for the codes of the sums; may be ``a`` or ``b``.
        rounding: As :func:`encode`.
        seed: As :func:`encode`.
    """
    loops = _loops({}, {'a': a, 'b': b, 'out': out}, written=['out'],
                   in_place=['a', 'b'])
    loops.add(a, b, out, *_rounding(rounding, seed))


def accumulate(codes: Any, total: Any) -> None:
    """Adds the values of fp8 codes to a float32 total.

    Args:
        codes: uint8 array.
        total: float32 array, changed in place.
    """
    _loops({'total': total}, {'codes': codes}, written=['total']).accumulate(
        codes, total)


def ratio_encode(gradient: Any, parameter: Any, out: Any, *, scale: float,
                 epsilon: float = 1e-5, residual: Any = None,
                 bound: float = math.inf, rounding: str = 'nearest',
                 seed: int = 0) -> Counts:
    """Encodes the ratio of gradient and parameter, with error feedback.

    With c = gradient + residual, an element of the wire is the code of
    ``c / (|w| + epsilon) * scale`` (Algorithm 1 of the fp8 paper).  What the
    code leaves out of c becomes the new residual, ``bound`` at most; where it
    is not finite it becomes 0.  A finite c never becomes infinite on the wire.

    Args:
        gradient: float32 array, not modified.
        parameter: float32 array, the w above.
        out: uint8 array for the codes.
        scale: Positive factor whose inverse is finite in float32, too.
        epsilon: Positive number that keeps the divisor from zero.
        residual: float32 array, changed in place, or ``None`` for no error
            feedback.
        bound: The largest residual; not negative.
        rounding: As :func:`encode`.
        seed: As :func:`encode`.

    Returns:
        How many elements saturated, and how many codes are not finite.
    """
    floats = {'gradient': gradient, 'parameter': parameter}
    written = ['out']
    if residual is not None:
        floats['residual'] = residual
        written.append('residual')
    loops = _loops(floats, {'out': out}, written=written)
    return Counts(*loops.ratio_encode(
        gradient, parameter, out, residual, *with_inverse(scale),
        _positive('epsilon', epsilon), bound, *_rounding(rounding, seed)))


def ratio_decode(wire: Any, parameter: Any, out: Any, *, scale: float,
                 epsilon: float = 1e-5) -> int:
    """Turns ratios back: ``ratio / scale * (|w| + epsilon)``.

    Args:
        wire: What :func:`ratio_encode` wrote (uint8), or a sum or mean of
            the values of such codes (float32).
        parameter: float32 array, the w above.
        out: float32 array for the gradients; may be a float32 ``wire``.
        scale: As :func:`ratio_encode`.
        epsilon: As :func:`ratio_encode`.

    Returns:
        How many of the gradients are not finite.
    """
    arrays: tuple[dict[str, Any], dict[str, Any]] = (
        {'parameter': parameter, 'out': out}, {})
    dtype = getattr(wire, 'dtype', _CODE)
    if dtype not in (_FLOAT, _CODE):
        raise TypeError(f'wire has dtype {dtype}, expected uint8 or float32')
    arrays[dtype == _CODE]['wire'] = wire
    loops = _loops(*arrays, written=['out'], in_place=['wire'])
    return loops.ratio_decode(wire, parameter, out, with_inverse(scale)[1],
                              _positive('epsilon', epsilon))


# --- records ---------------------------------------------------------------

@dataclass(frozen=True)
class RecordFormat:
    """A format of records; see the package.

    Attributes:
        name: ``'int4'``, ``'e2m1'`` or ``'int5'``.
        number: That compiled code has for the format.
        nbytes: Bytes of a record.
    """

    name: str
    number: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype of one record."""
        return np.dtype(f'V{self.nbytes}')

    def rows(self, records: np.ndarray) -> np.ndarray:
        """The bytes of m records, uint8[m, nbytes], in the same memory."""
        return records.view(np.uint8).reshape(-1, self.nbytes)

    def encode(self, values: Any, records: Any, *, factor: float = 1.0,
               residual: Any = None) -> int:
        """Rounds values to the nearest ones of the format, ties to even.

        With c = values * factor + residual, records hold c, and what they
        leave out of c becomes the new residual; 0 where a record holds a NaN
        or an infinity.  Of a record's largest element no more is kept than
        the next largest one has.

        Args:
            values: float32[n].
            records: Of :attr:`dtype`, or CuPy's rows, n / 32 of them,
                rounded up; written.
            factor: Float32, not negative.
            residual: float32[n], changed in place; None: no feedback.

        Returns:
            How many records hold a NaN or an infinity.
        """
        floats = {'values': values}
        if residual is not None:
            floats['residual'] = residual
        loops = _loops(floats, {}, written=[*floats][1:] + ['records'],
                       records=records, of=self)
        return loops.records_encode(values, factor, residual, records,
                                    self.number)

    def decode(self, records: Any, out: Any, *, factor: float = 1.0) -> int:
        """Writes the records' values times a factor.

        Args:
            records: As :meth:`encode` has written them.
            out: float32[n], written.
            factor: Float32, not negative.

        Returns:
            How many records hold NaN.
        """
        loops = _loops({'out': out}, {}, written=['out'], records=records,
                       of=self)
        return loops.records_decode(records, factor, out, False, self.number)

    def accumulate(self, records: Any, total: Any) -> None:
        """Adds the records' values to float32 sums.

        Args:
            records: As :meth:`encode` has written them.
            total: float32[n], changed in place.
        """
        loops = _loops({'total': total}, {}, written=['total'],
                       records=records, of=self)
        loops.records_decode(records, 1.0, total, True, self.number)


#: Formats of records by name.
FORMATS = {name: RecordFormat(name, number, nbytes)
           for number, (name, nbytes) in enumerate((
               ('int4', 17), ('e2m1', 17), ('int5', 21)))}


# --- arguments -------------------------------------------------------------

def is_cupy(array: object) -> bool:
    """Whether this is a CuPy array; imports nothing."""
    cupy = sys.modules.get('cupy')
    return cupy is not None and isinstance(array, cupy.ndarray)


def _loops(floats: dict[str, Any], codes: dict[str, Any], *,
           written: Collection[str], in_place: Collection[str] = (),
           records: Any = None, of: RecordFormat | None = None) -> ModuleType:
    """Checks the arguments of an operation; the loops for where they are.

    Args:
        floats: The float32 arguments by name.
        codes: The uint8 arguments by name.
        written: Names of the arguments that the operation writes.
        in_place: Names of inputs that may be the very array that is written.
        records: One of them.
        of: Their format.
    """
    arrays = {**floats, **codes, **({'records': records} if of else {})}
    on_gpu = _are_on_gpu(arrays)
    row = () if of else None
    wanted: dict[str, tuple[np.dtype, tuple[int, ...] | None]] = {
        **dict.fromkeys(floats, (_FLOAT, row)),
        **dict.fromkeys(codes, (_CODE, row))}
    if of:
        wanted['records'] = (_CODE, (of.nbytes,)) if on_gpu else (of.dtype, ())
    for name, array in arrays.items():
        _check_layout(name, array, *wanted[name])
    sizes = {name: array.size for name, array in arrays.items()
             if not of or name != 'records'}
    size = next(iter(sizes.values()))
    if set(sizes.values()) != {size}:
        raise ValueError('arrays must have the same size, but ' + ', '.join(
            f'{name} has {n}' for name, n in sizes.items()))
    if of and records.shape[0] != -(-size // RECORD):
        raise ValueError(f'{size} elements need {-(-size // RECORD)} '
                         f'records, not {records.shape[0]}')
    for name in written:
        if not on_gpu and not arrays[name].flags.writeable:
            raise ValueError(f'{name} is written, but it is read-only')
        for other, array in arrays.items():
            if other != name and _overlap(
                    arrays[name], array, other in in_place):
                raise ValueError(f'{name} shares memory with {other}')
    if not on_gpu:
        return _formats
    from . import gpu
    return gpu


def _are_on_gpu(arrays: dict[str, Any]) -> bool:
    """Whether all are CuPy arrays; TypeError unless all are of one kind."""
    on_gpu = [name for name, array in arrays.items() if is_cupy(array)]
    on_cpu = [name for name in arrays if name not in on_gpu]
    for name in on_cpu:
        if not isinstance(arrays[name], np.ndarray):
            raise TypeError(f'{name} must be a NumPy or CuPy array, '
                            f'not {type(arrays[name]).__name__}')
    if on_gpu and on_cpu:
        raise TypeError(
            'arrays must be all on the CPU or all on the GPU, but '
            f'{", ".join(on_cpu)} is NumPy and {", ".join(on_gpu)} is CuPy')
    return bool(on_gpu)


def _check_layout(name: str, array: Any, dtype: np.dtype,
                  row: tuple[int, ...] | None) -> None:
    """Checks dtype, order and, unless it is None, the shape of a row."""
    if array.dtype != dtype:
        raise TypeError(f'{name} has dtype {array.dtype}, expected {dtype}')
    if row is not None and (array.ndim != 1 + len(row)
                            or array.shape[1:] != row):
        raise ValueError(f'{name} has shape {array.shape}, expected '
                         f'{("n", *row)}')
    if not array.flags.c_contiguous:
        raise ValueError(f'{name} ({array.dtype}, shape {array.shape}) must '
                         'be C-contiguous')


def _overlap(out: Any, array: Any, in_place: bool) -> bool:
    """Whether memory is shared; with ``in_place`` it may be the very array."""
    (start, n), (other, m) = ((
        (one.__cuda_array_interface__ if is_cupy(one)
         else one.__array_interface__)['data'][0], one.nbytes)
        for one in (out, array))
    return (start < other + m and other < start + n and n * m > 0
            and not (in_place and (start, n) == (other, m)))


@functools.lru_cache(4096)
def _rounding(rounding: str, seed: int) -> tuple[int, int, int]:
    """Number of the rounding and the two keys of its random bits."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f'rounding is {rounding!r}, expected one of {ROUNDINGS}')
    return (ROUNDINGS.index(rounding), *random_keys(seed))


def random_keys(seed: int) -> tuple[int, int]:
    """Two keys of 32 bits; neighbouring seeds give unrelated ones.

    The finaliser of the SplitMix64 generator.
    """
    key = (operator.index(seed) + 0x9E3779B97F4A7C15) % 2 ** 64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2 ** 64
    key ^= key >> 31
    return key >> 32, key % 2 ** 32


@functools.lru_cache(4096)
def with_inverse(scale: float) -> tuple[float, float]:
    """The scale and its inverse as float32 numbers.

    Raises:
        ValueError: The scale is not positive, or one of them is not finite.
    """
    factor = _positive('scale', scale)
    with np.errstate(over='ignore'):
        inverse = float(np.float32(1) / np.float32(factor))
    if not np.isfinite(inverse):
        raise ValueError(f'scale is {scale!r}, its inverse is not finite')
    return factor, inverse


@functools.lru_cache(4096)
def _positive(name: str, value: float) -> float:
    """The value as a float32 number, if it is positive and finite there."""
    with np.errstate(over='ignore', under='ignore'):
        number = float(np.float32(value))
    if not 0 < number < np.inf:
        raise ValueError(
            f'{name} is {value!r}, expected a positive finite number '
            'within the range of float32')
    return number
