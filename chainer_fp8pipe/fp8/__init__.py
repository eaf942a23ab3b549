"""The E5M2 number format (one byte) and loops over it, on CPU and GPU.

Arrays are NumPy arrays, or all CuPy arrays; ``float32`` for values and
``uint8`` for codes, C-contiguous, of the same size (their shapes may differ).
Every operation writes into arrays that the caller gives.  Finite values
saturate at ``MAX``; NaN and infinity stay what they are.

Operations raise TypeError for an argument that is no array of its dtype, and
for a seed that is no integer; ValueError if sizes differ, an array is not
C-contiguous, arrays overlap, or a rounding, scale or epsilon is not allowed.
"""
from .constants import MAX, ROUNDINGS, TINY
from .operations import (
    Counts,
    accumulate,
    add,
    decode,
    encode,
    ratio_decode,
    ratio_encode,
    with_inverse,
)

__all__ = ['MAX', 'ROUNDINGS', 'TINY', 'Counts', 'accumulate', 'add', 'decode',
           'encode', 'ratio_decode', 'ratio_encode', 'with_inverse']
