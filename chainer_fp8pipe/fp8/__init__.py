"""The E5M2 number format (one byte) and loops over it, on CPU and GPU."""
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

__all__ = [
    'MAX',
    'ROUNDINGS',
    'TINY',
    'Counts',
    'accumulate',
    'add',
    'decode',
    'encode',
    'ratio_decode',
    'ratio_encode',
    'with_inverse',
]
