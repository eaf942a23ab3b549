"""Floating-point arrays as fp8 codes, with one scale per array and message.

The scale is the power of two that brings the largest finite magnitude to
between 28672 and 57344, the format's largest number, so multiplying by it
rounds nothing and no number saturates.  Its exponent travels with the codes.
NaN and infinity stay what they are; finite numbers stay finite.
"""
from __future__ import annotations

import math
from typing import Any

import numpy

from .. import formats
from ..codecs.staging import array_module, download, output, upload_now

EXPONENT = 4        # bytes before the codes: the scale's exponent, int32

# Larger exponents would leave the range of the dtype.  Only subnormal numbers
# lose by it: the smallest normal one comes to 1.
_LARGEST = {'f': 126, 'd': 1022}


def takes(dtype: numpy.dtype) -> bool:
    """Whether arrays of this dtype can cross as fp8."""
    return dtype.char in 'efd'


def encode(values: Any, part: numpy.ndarray) -> None:
    """Writes an array into its part of a message.

    Args:
        values: Flat array of a dtype that :func:`takes` allows; not empty.
        part: uint8 host array of ``EXPONENT + values.size``.
    """
    values = values.astype(_wide(values.dtype), copy=False)
    exponent = min(_exponent(values), _LARGEST[values.dtype.char])
    part[:EXPONENT] = numpy.array([exponent], '<i4').view(numpy.uint8)
    scaled = values * values.dtype.type(2.0 ** exponent)
    wire = part[EXPONENT:]
    codes = output(array_module(values), wire)
    formats.encode(scaled.astype(numpy.float32, copy=False), codes)
    download(codes, wire)


def decode(part: numpy.ndarray, dtype: numpy.dtype, xp: Any) -> Any:
    """The flat array of ``xp`` that :func:`encode` wrote."""
    exponent = int(part[:EXPONENT].view('<i4')[0])
    codes = upload_now(xp, part[EXPONENT:])
    scaled = xp.empty(codes.size, numpy.float32)
    formats.decode(codes, scaled)
    wide = _wide(dtype)
    values = scaled.astype(wide, copy=False)
    if exponent < 0:
        _keep_finite(xp, values, math.ldexp(
            float(numpy.finfo(dtype).max), exponent))
    values *= wide.type(2.0 ** -exponent)
    return values.astype(dtype, copy=False)


def _wide(dtype: numpy.dtype) -> numpy.dtype:
    """The dtype to compute in."""
    return numpy.dtype('d' if dtype.char == 'd' else 'f')


def _exponent(values: Any) -> int:
    largest = _largest(values)
    if not math.isfinite(largest):
        finite = values[array_module(values).isfinite(values)]
        largest = _largest(finite) if finite.size else 0.0
    if not largest:
        return 0
    mantissa, exponent = math.frexp(largest)
    # 57344 is 7/8 of 2 ** 16.
    return (16 if mantissa <= 0.875 else 15) - exponent


def _largest(values: Any) -> float:
    """The largest magnitude; not finite if one is not."""
    high, low = float(values.max()), float(values.min())
    if math.isfinite(high) and math.isfinite(low):
        return max(high, -low)
    return math.nan


def _keep_finite(xp: Any, scaled: Any, limit: float) -> None:
    """Brings back what was rounded up beyond the dtype's largest number."""
    if limit < formats.MAX:
        finite = xp.isfinite(scaled)
        scaled[finite & (scaled > limit)] = limit
        scaled[finite & (scaled < -limit)] = -limit
