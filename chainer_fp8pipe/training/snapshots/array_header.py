"""The header of an array in a snapshot: ``.npy``, read narrowly.

NumPy's own reader evaluates the header as Python and allocates what it says.
Here it must be exactly what NumPy writes for an array of plain numbers or
texts, and its shape and dtype must give the size that the file has.

The format: NEP 1, version 1.0.
"""
from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy

from .zip_directory import DamagedSnapshot

#: Bytes that hold any header as a snapshot has it.
LONGEST = 1024
#: Kinds of dtype that are numbers, texts or times, and nothing else.
PLAIN_KINDS = frozenset('biufcSUmM')
_MOST = 1 << 60             # bytes of an array that NumPy can count
_MAGIC = b'\x93NUMPY\x01\x00'
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[?biufcSUmMO]\d{0,9}(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)'"
    rb", 'fortran_order': (True|False), 'shape': "
    rb'\((\d{1,19},|\d{1,19}(?:, \d{1,19})+|)\), \} *\n')


class ArrayHeader(NamedTuple):
    """What a header says of its array."""

    dtype: numpy.dtype
    shape: tuple[int, ...]
    by_columns: bool        # Fortran's order
    size: int               # of the header, in bytes

    @property
    def data(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * math.prod(self.shape)


def parse_header(head: bytes) -> ArrayHeader:
    """Reads the header at the start of a member; nothing is allocated.

    ``head`` is the member's first :data:`LONGEST` bytes, or all of them.

    Raises:
        DamagedSnapshot: It is not a header as a snapshot has it.
    """
    if head[:8] != _MAGIC or len(head) < 10:
        raise DamagedSnapshot('an array has no header of version 1.0')
    size = 10 + int.from_bytes(head[8:10], 'little')
    match = _HEADER.fullmatch(head[10:size])
    if match is None or len(head) < size:
        raise DamagedSnapshot(
            'the header of an array is not one of plain numbers or texts')
    shape = tuple(map(int, filter(None, match[3].split(b','))))
    try:
        dtype = numpy.dtype(match[1].decode())
    except (TypeError, ValueError) as error:
        raise DamagedSnapshot(
            f'an array has a dtype that is none: {error}') from None
    # NumPy counts the bytes of an empty array without its empty dimensions.
    counted = dtype.itemsize * math.prod(filter(None, shape))
    if len(shape) > 32 or counted > _MOST or (
            dtype.itemsize == 0 and shape):
        raise DamagedSnapshot('an array has a shape that no array has')
    return ArrayHeader(dtype, shape, match[2] == b'True', size)


def header_of(value: numpy.ndarray) -> bytes:
    """The header of an array in C order, padded as NumPy pads it.

    The array's bytes then start at a multiple of 64 from the header's start.
    """
    text = (f"{{'descr': {value.dtype.str!r}, 'fortran_order': False, "
            f"'shape': {value.shape!r}, }}").encode()
    padding = -(len(_MAGIC) + 2 + len(text) + 1) % 64
    text += b' ' * padding + b'\n'
    return _MAGIC + len(text).to_bytes(2, 'little') + text
