"""Number formats of 4 and 5 bits, whose scale 32 elements share.

A record holds 32 elements of an array, or, as an array's last one, fewer; it
has 17 bytes (4.25 bits per element) or 21 (5.25 bits).  Arrays are NumPy
arrays: float32 for values, of one dimension, and the format's ``dtype`` for
records, C-contiguous.  Or all are CuPy arrays, where records are the rows of
a uint8 array; the bits are the same.  Every operation writes into arrays that
the caller gives.

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
"""
from .record_format import FORMATS, RECORD, RecordFormat

__all__ = ['FORMATS', 'RECORD', 'RecordFormat']
