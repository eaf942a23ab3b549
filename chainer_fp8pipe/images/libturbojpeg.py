"""Decodes a part of a JPEG with libjpeg-turbo 3, by way of ctypes.

``tj3SetCroppingRegion`` came with version 3 of the TurboJPEG interface; no
binding for Python has it, hence the few declarations here.  The library is
the system's if that is of version 3, and otherwise the one that the wheel
``turbojpeg`` carries.

A JPEG is coded from top to bottom in blocks.  All codes down to the lower
edge of the part must be read, and are thrown away outside it; the inverse
transform, the chroma upsampling and the colour conversion, more than half of
the work, are done for the part only.  Where the part is much larger than what
is made of it, the inverse transform itself computes every second, fourth or
eighth pixel as an average (Independent JPEG Group, libjpeg.txt, "scaled
decoding").
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p

import numpy

from .transforms import Crop

_DECOMPRESS = 1         # TJINIT_DECOMPRESS
_RGB = 0                # TJPF_RGB
# TJPARAM_JPEGWIDTH, _JPEGHEIGHT, _SUBSAMP, _COLORSPACE, _PRECISION.
_WHAT = (5, 6, 4, 8, 7)
_COLOURS = (0, 1, 2)    # TJCS: RGB, YCbCr, grey; others are not converted
# Width of a minimum coded unit, in pixels, by chroma subsampling (TJSAMP):
# 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1.
_UNIT_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
# Columns at the left and right edge of a region may differ from those of the
# whole image, as the chroma upsampling looks at their neighbours.
_MARGIN = 2
_NAMES = ('libturbojpeg.so.0', 'libturbojpeg.0.dylib', 'turbojpeg.dll')


class _Region(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ('x', 'y', 'w', 'h')]


class _Factor(ctypes.Structure):
    _fields_ = [('numerator', c_int), ('denominator', c_int)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """libturbojpeg of version 3; None if it is not installed."""
    for path in [*_NAMES, *_in_wheel()]:
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(path)
            if hasattr(found, 'tj3SetCroppingRegion'):
                return _declared(found)
    return None


def decode(data: bytes,
           choose: Callable[[int, int], tuple[Crop, int]]
           ) -> tuple[numpy.ndarray, tuple[Crop, int]] | None:
    """Decodes a part of a JPEG; several threads may do so.

    Args:
        data: The file.
        choose: Returns, for the width and height in pixels, the part, and
            which of 1, 2, 4, 8 pixels become one, in both directions.

    Returns:
        The pixels that cover the part, of shape (h, w, 3), uint8: columns
        ``floor(left / shrink)`` to ``ceil((left + w) / shrink)`` of the
        shrunk image, and rows likewise; and what was chosen.  None if the
        library cannot decode this part, or is not sure.

    Raises:
        RuntimeError: The library is not there, or has no memory.
    """
    tj = library()
    # A new instance for each file, in some microseconds: one that has seen a
    # damaged file can refuse sound ones.
    handle = tj and tj.tj3Init(_DECOMPRESS)
    if not tj or not handle:
        raise RuntimeError('no decompressor of libturbojpeg 3')
    try:
        file = numpy.frombuffer(data, numpy.uint8)
        source = file.ctypes.data, file.size
        if tj.tj3DecompressHeader(handle, *source):
            return None
        width, height, subsampling, colours, bits = (
            tj.tj3Get(handle, what) for what in _WHAT)
        if not 0 <= subsampling < len(_UNIT_WIDTHS) \
                or colours not in _COLOURS or bits != 8:
            return None
        chosen = choose(width, height)
        (left, top, w, h), shrink = chosen[0].box, chosen[1]
        right, bottom = -(-(left + w) // shrink), -(-(top + h) // shrink)
        left, top = left // shrink, top // shrink
        # The region must start between two units.
        unit = -(-_UNIT_WIDTHS[subsampling] // shrink)
        start = max(0, left - _MARGIN) // unit * unit
        stop = min(-(-width // shrink), right + _MARGIN)
        if tj.tj3SetScalingFactor(handle, _Factor(1, shrink)) \
                or tj.tj3SetCroppingRegion(handle, _Region(
                    start, top, stop - start, bottom - top)):
            return None
        pixels = numpy.empty((bottom - top, stop - start, 3), numpy.uint8)
        if tj.tj3Decompress8(handle, *source, pixels.ctypes.data, 0, _RGB):
            return None
        return pixels[:, left - start:right - start], chosen
    finally:
        tj.tj3Destroy(handle)


def _in_wheel() -> list[str]:
    """Paths of the library in the wheel ``turbojpeg``."""
    try:
        files = importlib.metadata.files('turbojpeg') or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(path.locate()) for path in files
            if path.name.startswith(('libturbojpeg', 'turbojpeg-'))
            and {'.so', '.dylib', '.dll'} & {*path.suffixes}]


def _declared(tj: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the types of the functions in use (turbojpeg.h)."""
    for name, result, *arguments in (
            ('tj3Init', c_void_p, c_int),
            ('tj3Destroy', None, c_void_p),
            ('tj3Get', c_int, c_void_p, c_int),
            ('tj3DecompressHeader', c_int, c_void_p, c_void_p, c_size_t),
            ('tj3SetScalingFactor', c_int, c_void_p, _Factor),
            ('tj3SetCroppingRegion', c_int, c_void_p, _Region),
            ('tj3Decompress8', c_int, c_void_p, c_void_p, c_size_t, c_void_p,
             c_int, c_int)):
        function = getattr(tj, name)
        function.restype, function.argtypes = result, arguments
    return tj
