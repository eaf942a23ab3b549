"""The operations on arrays of fp8 codes; the package says what is common."""
from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from .arrays import FLOAT, loops_for
from .constants import ROUNDINGS


class Counts(NamedTuple):
    """What did not fit the format.

    Attributes:
        clipped: Elements whose value was finite and beyond ``MAX``.
        nonfinite: Elements whose code is an infinity or NaN.
    """

    clipped: int
    nonfinite: int


def encode(values: Any, out: Any, *, rounding: str = 'nearest', seed: int = 0
           ) -> None:
    """Rounds float32 values to fp8 codes.

    Args:
        values: float32 array.
        out: uint8 array for the codes.
        rounding: ``'nearest'`` (ties to even, in one step from float32),
            ``'truncate'`` (the upper byte of the nearest IEEE half) or
            ``'stochastic'`` (up with the probability of the distance from
            below in steps, so that the expectation is the value).
        seed: Any integer; only ``'stochastic'`` uses it.  The same seed
            gives the same codes, on the CPU and on the GPU.
    """
    loops = loops_for({'values': values}, {'out': out}, written=['out'])
    loops.encode(values, out, *_rounding(rounding, seed))


def decode(codes: Any, out: Any) -> None:
    """Writes the values of fp8 codes; exact.

    Args:
        codes: uint8 array.
        out: float32 array for the values.
    """
    loops = loops_for({'out': out}, {'codes': codes}, written=['out'])
    loops.decode(codes, out)


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
    loops = loops_for(
        {}, {'a': a, 'b': b, 'out': out}, written=['out'],
        in_place=['a', 'b'])
    loops.add(a, b, out, *_rounding(rounding, seed))


def accumulate(codes: Any, total: Any) -> None:
    """Adds the values of fp8 codes to a float32 total.

    Args:
        codes: uint8 array.
        total: float32 array, changed in place.
    """
    loops = loops_for({'total': total}, {'codes': codes}, written=['total'])
    loops.accumulate(codes, total)


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
    loops = loops_for(floats, {'out': out}, written=written)
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
    floats = {'parameter': parameter, 'out': out}
    codes = {}
    if getattr(wire, 'dtype', None) == FLOAT:
        floats['wire'] = wire
    elif getattr(wire, 'dtype', np.uint8) == np.uint8:
        codes['wire'] = wire
    else:
        raise TypeError(
            f'wire has dtype {wire.dtype}, expected uint8 or float32')
    loops = loops_for(floats, codes, written=['out'], in_place=['wire'])
    _, inverse = with_inverse(scale)
    return loops.ratio_decode(
        wire, parameter, out, inverse, _positive('epsilon', epsilon))


# A model has hundreds of tensors, whose scales stay for many updates: what is
# derived from them is remembered, or it would take longer than the loops.

@functools.lru_cache(4096)
def _rounding(rounding: str, seed: int) -> tuple[int, int, int]:
    """Number of the rounding and the two keys of its random bits."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f'rounding is {rounding!r}, expected one of {ROUNDINGS}')
    # Neighbouring seeds must give unrelated keys (the finaliser of the
    # SplitMix64 generator).
    key = (operator.index(seed) + 0x9E3779B97F4A7C15) % 2 ** 64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2 ** 64
    key ^= key >> 31
    return ROUNDINGS.index(rounding), key >> 32, key % 2 ** 32


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
