"""The forms in which partial sums travel from one rank to the next."""
from __future__ import annotations

import numpy

from ..codecs import Codec

#: Names of the forms that a partial sum may travel in.
FORMS = ('wire', 'float16', 'float32')


def in_wire_format(form: str, codec: Codec) -> bool:
    """Whether sums are made in the wire's own format, inside the wire.

    Contributions must then be divided by the number of workers before they
    are encoded; a sum is a mean, and cannot overflow.
    """
    return form == 'wire' or codec.wire_dtype == numpy.float32


def shrink(dtype: numpy.dtype, workers: int) -> float:
    """The power of two by which sums are multiplied to travel in ``dtype``.

    In float16, a sum of saturated values of so many workers would overflow.
    Its 11 significant bits lose little beside the 3 of fp8.
    """
    if dtype != numpy.float16:
        return 1.0
    return 0.5 ** (workers - 1).bit_length()
