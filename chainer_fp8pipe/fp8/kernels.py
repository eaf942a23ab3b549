"""The GPU's element-wise kernels as data: text around the format's header.

Each kernel has the parts of a ``cupy.ElementwiseKernel``.  They are data, so
that tests can compile and run them where there is no GPU.  In an operation
``i`` is the index of the element in the whole array.
"""
from __future__ import annotations

from importlib import resources
from typing import NamedTuple

from .constants import ROUNDINGS

#: No contraction of a * b + c, so that CPU and GPU give the same bits.
OPTIONS = ('--fmad=false',)

_KEYS = ', uint32 key0, uint32 key1'

# High word of the index first shifted as 64 bits: i may be a 32-bit integer.
_RANDOM = (
    'e5m2_random((unsigned int)i, (unsigned int)((long long)i >> 32), '
    'key0, key1)')


class Kernel(NamedTuple):
    """One kernel; parameters are ``'dtype name, dtype name'``."""

    name: str
    in_params: str
    out_params: str
    operation: str


def preamble() -> str:
    """The format's header: ``e5m2.h``."""
    header = resources.files(__package__).joinpath('e5m2.h')
    return header.read_text(encoding='utf-8')


def encode(rounding: int) -> Kernel:
    """One uint8 code for each float32 value."""
    return Kernel(
        f'e5m2_encode_{ROUNDINGS[rounding]}',
        f'float32 value{_KEYS}',
        'uint8 code',
        f'code = e5m2_encode(value, {rounding}, {_RANDOM});',
    )


def decode() -> Kernel:
    """The float32 value of each uint8 code."""
    return Kernel(
        'e5m2_decode_codes',
        'uint8 code',
        'float32 value',
        'value = e5m2_decode(code);',
    )


def add(rounding: int) -> Kernel:
    """The code of the sum of two codes."""
    return Kernel(
        f'e5m2_add_{ROUNDINGS[rounding]}',
        f'uint8 a, uint8 b{_KEYS}',
        'uint8 sum',
        f'sum = e5m2_add(a, b, {rounding}, {_RANDOM});',
    )


def accumulate() -> Kernel:
    """Adds the value of a code to a float32 total."""
    return Kernel(
        'e5m2_accumulate_codes',
        'uint8 code',
        'float32 total',
        'total = e5m2_accumulate(total, code);',
    )


def ratio_encode(rounding: int) -> Kernel:
    """Code of a ratio; ``flags`` is 1 if it clipped, 2 if not finite.

    Whatever is not finite counts as large, too.
    """
    return Kernel(
        f'e5m2_ratio_encode_{ROUNDINGS[rounding]}',
        'float32 gradient, float32 parameter, float32 scale, '
        f'float32 epsilon{_KEYS}',
        'uint8 code, uint8 flags',
        f'''
        float weight = e5m2_weight(parameter, epsilon);
        float ratio = e5m2_ratio(gradient, weight, scale);
        code = e5m2_encode_ratio(ratio, gradient, {rounding}, {_RANDOM});
        flags = e5m2_is_large(ratio) + e5m2_is_nonfinite(ratio, gradient);
        ''',
    )


def ratio_feedback(rounding: int) -> Kernel:
    """As :func:`ratio_encode`, and what the code leaves out is kept."""
    return Kernel(
        f'e5m2_ratio_feedback_{ROUNDINGS[rounding]}',
        'float32 gradient, float32 parameter, float32 scale, '
        f'float32 inverse, float32 epsilon, float32 bound{_KEYS}',
        'uint8 code, uint8 flags, float32 residual',
        f'''
        float value = gradient + residual;
        float weight = e5m2_weight(parameter, epsilon);
        float ratio = e5m2_ratio(value, weight, scale);
        code = e5m2_encode_ratio(ratio, value, {rounding}, {_RANDOM});
        flags = e5m2_is_large(ratio) + e5m2_is_nonfinite(ratio, value);
        residual = e5m2_residual(value, code, weight, inverse, bound);
        ''',
    )


def ratio_decode(dtype: str) -> Kernel:
    """Gradients from codes (uint8) or from ratios (float32)."""
    ratio = 'e5m2_decode(wire)' if dtype == 'uint8' else 'wire'
    return Kernel(
        f'e5m2_ratio_decode_{dtype}',
        f'{dtype} wire, float32 parameter, float32 inverse, float32 epsilon',
        'float32 gradient',
        f'''
        float weight = e5m2_weight(parameter, epsilon);
        gradient = e5m2_from_ratio({ratio}, weight, inverse);
        ''',
    )
