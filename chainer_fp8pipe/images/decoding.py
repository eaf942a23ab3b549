"""Encoded images to pixels: only the part, and the size, that are needed.

A transform draws its part from the size alone, which stands in the file's
head.  Of a JPEG all codes down to the part's lower edge must be read; the
inverse transform, the chroma upsampling and the colour conversion, more than
half of the work, are done for the part only by libjpeg-turbo 3
(``tj3SetCroppingRegion``, which no binding for Python has).  The library is
the system's if that is of version 3, else the one in the wheel ``turbojpeg``;
without one Pillow decodes the whole image.  Where the part is 2, 4 or 8 times
as large as the result, both average while they decode (Independent JPEG Group,
libjpeg.txt, "scaled decoding").

Resizing is Pillow's BILINEAR: a triangle as wide as one pixel of the coarser
grid.  cykooz_resizer computes the same four times as fast; single values
differ by 1 of 255, very few by 2, as both round twice.

All of them release the interpreter, so that threads decode at the same time.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import io
import logging
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import numpy

from .transforms import Crop

try:
    import cykooz_resizer
except ImportError:
    cykooz_resizer = None

_log = logging.getLogger(__name__)

#: As Pillow has it: a quarter of a gigabyte of pixels.
MAX_PIXELS = 89_478_485


def decode(data: bytes, plan: Callable[[int, int], Crop]) -> numpy.ndarray:
    """Decodes, crops, resizes and mirrors; several threads may do so.

    Args:
        data: The file, JPEG or PNG.
        plan: Returns the part, for the width and height in pixels.

    Returns:
        Shape ``(*size, 3)`` for the size of the part, uint8: red, green,
        blue; maybe read-only.

    Raises:
        ValueError: The file is too large or of another kind, or the part is
            not inside the image.
        Exception: The file is damaged; the kinds that Pillow raises are many.
    """
    def choose(width: int, height: int) -> tuple[Crop, int]:
        if width * height > MAX_PIXELS:
            # A small file can claim more than there is memory for.
            raise ValueError(
                f'it is too large: {width} x {height} pixels, and '
                f'{MAX_PIXELS:,} are allowed; make it smaller')
        part = plan(width, height)
        left, top, w, h = part.box
        if min(left, top, w - 1, h - 1, width - left - w,
               height - top - h) < 0:
            raise ValueError(
                f'the part (left, top, width, height) = {part.box} is not '
                f'inside an image of {width} x {height}')
        # Shrunk so far, the part is still as large as the result.
        return part, next((shrink for shrink in (8, 4, 2)
                           if w >= shrink * part.size[1]
                           and h >= shrink * part.size[0]), 1)
    is_jpeg = data.startswith(b'\xff\xd8')
    if not is_jpeg and not data.startswith(b'\x89PNG'):
        raise ValueError('it is neither JPEG nor PNG: it starts with '
                         f'{data[:8]!r}')
    if is_jpeg and library() and (found := decode_part(data, choose)):
        return resize(*found)
    from PIL import Image
    image: Any = Image.open(io.BytesIO(data), formats=('JPEG', 'PNG'))
    part, shrink = choose(*image.size)
    shrink = shrink if is_jpeg else 1
    image.draft(None, (image.width // shrink, image.height // shrink))
    if image.mode.startswith('I'):
        # 16 bits of grey; Pillow's own conversion cuts off all above 255.
        pixels = numpy.repeat((numpy.asarray(image) >> 8).astype(
            numpy.uint8)[:, :, None], 3, axis=2)
    else:       # grey tripled, ink as light, no transparency
        pixels = numpy.asarray(image.convert('RGB'))
    left, top, right, bottom = _covering(part, shrink)
    return resize(pixels[top:bottom, left:right], part, shrink)


def _covering(part: Crop, shrink: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom: the pixels of a shrunk image with a part."""
    left, top, width, height = part.box
    return (left // shrink, top // shrink, -(-(left + width) // shrink),
            -(-(top + height) // shrink))


# --- libjpeg-turbo -----------------------------------------------------------

# TJPARAM_JPEGWIDTH, _JPEGHEIGHT, _SUBSAMP, _COLORSPACE, _PRECISION; TJINIT and
# TJPF; TJCS that are converted: RGB, YCbCr, grey.
_WHAT, _DECOMPRESS, _RGB, _COLOURS = (5, 6, 4, 8, 7), 1, 0, (0, 1, 2)
# Width of a minimum coded unit, in pixels, by chroma subsampling (TJSAMP):
# 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1.
_UNIT_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
# Columns at the left and right edge of a region may differ from those of the
# whole image, as the chroma upsampling looks at their neighbours.
_MARGIN = 2


class _Region(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ('x', 'y', 'w', 'h')]


class _Factor(ctypes.Structure):
    _fields_ = [('numerator', c_int), ('denominator', c_int)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """libturbojpeg of version 3; None, said once, if it is not installed."""
    try:
        wheel = importlib.metadata.files('turbojpeg') or []
    except importlib.metadata.PackageNotFoundError:
        wheel = []
    for path in ('libturbojpeg.so.0', 'libturbojpeg.0.dylib', 'turbojpeg.dll',
                 *(str(one.locate()) for one in wheel if one.name.startswith(
                     ('libturbojpeg', 'turbojpeg-')))):
        with contextlib.suppress(OSError, AttributeError):
            tj = ctypes.CDLL(path)
            for name, result, *arguments in (       # of turbojpeg.h
                    ('tj3Init', c_void_p, c_int),
                    ('tj3Destroy', None, c_void_p),
                    ('tj3Get', c_int, c_void_p, c_int),
                    ('tj3DecompressHeader', c_int, c_void_p, c_void_p,
                     c_size_t),
                    ('tj3SetScalingFactor', c_int, c_void_p, _Factor),
                    ('tj3SetCroppingRegion', c_int, c_void_p, _Region),
                    ('tj3Decompress8', c_int, c_void_p, c_void_p, c_size_t,
                     c_void_p, c_int, c_int)):
                function = getattr(tj, name)
                function.restype, function.argtypes = result, arguments
            return tj
    _log.warning('there is no libturbojpeg 3: Pillow decodes JPEGs, which is '
                 "slower: pip install 'chainer_fp8pipe[images]'")
    return None


def decode_part(data: bytes, choose: Callable[[int, int], tuple[Crop, int]]
                ) -> tuple[numpy.ndarray, Crop, int] | None:
    """Decodes a part of a JPEG with libjpeg-turbo.

    ``choose`` returns the part for the width and height in pixels, and the
    factor by which a decoder may shrink.

    Returns:
        The pixels of the shrunk image that cover the part, of shape (h, w,
        3), uint8, and what was chosen.  None if the library cannot decode
        this part, or is not sure.
    """
    tj: Any = library()
    # A new instance for each file, in some microseconds: one that has seen a
    # damaged file can refuse sound ones.
    handle = tj.tj3Init(_DECOMPRESS)
    try:
        file = numpy.frombuffer(data, numpy.uint8)
        source = file.ctypes.data, file.size
        if not handle or tj.tj3DecompressHeader(handle, *source):
            return None
        width, height, subsampling, colours, bits = (
            tj.tj3Get(handle, what) for what in _WHAT)
        if not 0 <= subsampling < len(_UNIT_WIDTHS) \
                or colours not in _COLOURS or bits != 8:
            return None
        part, shrink = choose(width, height)
        left, top, right, bottom = _covering(part, shrink)
        # The region must start between two units.
        unit = -(-_UNIT_WIDTHS[subsampling] // shrink)
        start = max(0, left - _MARGIN) // unit * unit
        stop = min(-(-width // shrink), right + _MARGIN)
        pixels = numpy.empty((bottom - top, stop - start, 3), numpy.uint8)
        if tj.tj3SetScalingFactor(handle, _Factor(1, shrink)) \
                or tj.tj3SetCroppingRegion(handle, _Region(
                    start, top, stop - start, bottom - top)) \
                or tj.tj3Decompress8(handle, *source, pixels.ctypes.data, 0,
                                     _RGB):
            return None
        return pixels[:, left - start:right - start], part, shrink
    finally:
        tj.tj3Destroy(handle)


# --- resizing ----------------------------------------------------------------

def resize(pixels: numpy.ndarray, plan: Crop, shrink: int = 1
           ) -> numpy.ndarray:
    """Resizes and mirrors the pixels that cover a part of a shrunk image.

    From (H, W, 3) to ``(*plan.size, 3)``, uint8.
    """
    if shrink == 1 and pixels.shape[:2] == plan.size:
        return pixels[:, ::-1] if plan.flip else pixels
    # The part's edges may lie within pixels.
    left, top, width, height = (side / shrink for side in (
        plan.box[0] % shrink, plan.box[1] % shrink, *plan.box[2:]))
    if fast := cykooz_resizer:
        options = fast.ResizeOptions(fast.ResizeAlg.convolution(
            fast.FilterType.bilinear))
        options.crop_box = fast.CropBox(left, top, width, height)
        found = fast.ImageData(*plan.size[::-1], fast.PixelType.U8x3)
        fast.Resizer().resize(fast.ImageData(
            pixels.shape[1], pixels.shape[0], fast.PixelType.U8x3,
            pixels.tobytes()), found, options)
        result = numpy.frombuffer(found.get_buffer(), numpy.uint8).reshape(
            *plan.size, 3)
    else:
        from PIL import Image
        result = numpy.asarray(Image.fromarray(pixels).resize(
            plan.size[::-1], Image.Resampling.BILINEAR,
            (left, top, left + width, top + height)))
    return result[:, ::-1] if plan.flip else result
