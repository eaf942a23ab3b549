"""Encoded images to pixels: only the part, and the size, that are needed."""
# A transform draws its part from the size alone, which stands in the file's
# head (read_header).  Faults of a file are found there if they can be, where
# nothing is decoded: they then depend neither on the decoder nor on the part.
#
# libjpeg-turbo decodes the rows down to the lower edge of the part, and of
# these only the part's columns; Pillow decodes the whole image.  Both let the
# inverse transform shrink by 2, 4 or 8 where the part is that much larger
# than the result (shrink_for).
#
# The rest is resizing, by Pillow's definition of BILINEAR: a triangle as wide
# as one pixel of the coarser of the two grids, so that shrinking averages and
# nothing is skipped.  cykooz_resizer computes the same with vector
# instructions, about four times as fast; single values differ by 1 of 255,
# very few by 2, as both round twice.
#
# libjpeg-turbo, Pillow and cykooz_resizer release the interpreter while they
# compute, so that threads decode at the same time.
from __future__ import annotations

import functools
import io
import logging
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy

from . import libturbojpeg
from .transforms import Crop

try:
    import cykooz_resizer
except ImportError:
    cykooz_resizer = None

_log = logging.getLogger(__name__)
_local = threading.local()      # a thread's resizer

#: As Pillow has it: a quarter of a gigabyte of pixels.
MAX_PIXELS = 89_478_485


class ImageError(ValueError):
    """One image cannot be used; the message names the file and why.

    Args:
        path: The file; '' where only its bytes are known, as in a decoder.
        reason: The fault and, where there is one, the remedy.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)      # so that it can be pickled
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f'{self.path}: {self.reason}' if self.path else self.reason


# --- the head of a file ------------------------------------------------------

_PNG = b'\x89PNG\r\n\x1a\n'
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = b'\xff\xd9'
# C0 to CF start a frame, but for these three: tables and an extension.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}


def read_header(data: bytes) -> tuple[int, int, str, bool]:
    """Reads the head of an image file.

    Returns:
        Width and height in pixels; 'JPEG' or 'PNG'; and whether
        libjpeg-turbo decodes it: 8 bits of grey or three colours, in
        Huffman codes.

    Raises:
        ImageError: The file is empty, neither JPEG nor PNG, has no image in
            it or one of more than :data:`MAX_PIXELS` or, for JPEG, is cut
            short.
    """
    if not data:
        raise ImageError('', 'the file is empty')
    kind, usual = 'PNG', False
    try:
        if data.startswith(b'\xff\xd8'):
            kind = 'JPEG'
            width, height, usual = _frame_of_jpeg(data)
        elif data.startswith(_PNG):
            width, height = struct.unpack_from('>II', data, 16)
        else:
            raise ImageError('', 'is neither JPEG nor PNG: it starts with '
                             f'{data[:8]!r}')
    except (IndexError, struct.error):
        raise ImageError('', 'is cut short in its header') from None
    if not width or not height:
        raise ImageError('', f'has no pixels: its header says {width} x '
                         f'{height}')
    if width * height > MAX_PIXELS:
        # A small file can claim more than there is memory for.
        raise ImageError('', f'is too large: {width} x {height} pixels, and '
                         f'{MAX_PIXELS:,} are allowed; make it smaller')
    return width, height, kind, usual


def _frame_of_jpeg(data: bytes) -> tuple[int, int, bool]:
    """Walks from marker to marker up to the first scan."""
    frame = None
    position = 2
    while True:
        # As decoders do: skips what is no marker, and the bytes that fill.
        position = data.find(b'\xff', position)
        if position < 0:
            raise IndexError
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1
        if marker == 0 or marker in _WITHOUT_LENGTH:
            continue
        if marker in _FRAMES:
            bits, height, width, components = struct.unpack_from(
                '>BHHB', data, position + 2)
            # Above C2 are lossless and arithmetic codes; four components are
            # CMYK, which libjpeg-turbo does not convert.
            frame = width, height, (marker <= 0xC2 and bits == 8
                                    and components in (1, 3))
        if marker in (_START_OF_SCAN, _END_OF_IMAGE[1]):
            break
        position += struct.unpack_from('>H', data, position)[0]
    if frame is None or marker != _START_OF_SCAN:
        raise ImageError('', 'is a JPEG without an image')
    # No coded pixel contains this marker; a thumbnail in front of the scan
    # may.  A decoder that stops below the part that is wanted would not see.
    if data.rfind(_END_OF_IMAGE, position) < 0:
        raise ImageError('', 'is cut short: the end of the JPEG is missing')
    return frame


# --- decoders ----------------------------------------------------------------

class Decoder:
    """Turns the bytes of one file into pixels.

    A decoder of one's own is any object that has ``decode``, which several
    threads call.

    Attributes:
        name: Makes an equal decoder with :func:`create_decoder`; never
            'auto'.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def decode(self, data: bytes, choose: Callable[[int, int], Crop]
               ) -> numpy.ndarray:
        """Decodes, crops, resizes and mirrors.

        Args:
            data: The file.
            choose: Returns the part, for the width and height in pixels.

        Returns:
            Shape ``(*size, 3)`` for the size of the part, uint8: red, green,
            blue; maybe read-only.

        Raises:
            ImageError: The file is not an image that can be used.
            ValueError: The part is not inside the image.
        """
        width, height, kind, usual = read_header(data)
        plan = choose(width, height)
        left, top, w, h = plan.box
        if left < 0 or top < 0 or w < 1 or h < 1 \
                or left + w > width or top + h > height:
            raise ValueError(
                f'the part (left, top, width, height) = {plan.box} is not '
                f'inside an image of {width} x {height}')
        if usual and self.name == 'turbojpeg':
            shrink = shrink_for(plan)
            pixels = libturbojpeg.decode(data, width, plan.box, shrink)
            if pixels is not None:
                return resize(pixels, plan, shrink, left // shrink,
                              top // shrink)
        return _decode_with_pillow(data, kind, plan)


def create_decoder(name: str = 'auto') -> Decoder:
    """A decoder of JPEG and PNG files, which several threads may use.

    Args:
        name: ``'turbojpeg'`` decodes only the part that is needed, with
            libjpeg-turbo 3; Pillow decodes other files.  ``'pillow'`` decodes
            the whole image, only as finely as needed.  ``'auto'`` takes
            ``'turbojpeg'`` if its library is there, else ``'pillow'``; the log
            names missing libraries once.

    Raises:
        ValueError: There is no such decoder.
        RuntimeError: ``'turbojpeg'`` was asked for and is not there.
        ImportError: Pillow is not installed.
    """
    _pillow_files()
    if name == 'auto':
        name = 'turbojpeg' if libturbojpeg.library() else 'pillow'
        _tell_what_is_missing()
    if name not in ('turbojpeg', 'pillow'):
        raise ValueError(f'no decoder {name!r}; there are auto, turbojpeg, '
                         'pillow')
    if name == 'turbojpeg' and libturbojpeg.library() is None:
        raise RuntimeError(
            f'the decoder {name!r} needs libturbojpeg 3: install '
            "chainer_fp8pipe[images], or use the decoder 'pillow'")
    return Decoder(name)


@functools.cache
def _tell_what_is_missing() -> None:
    """Logs which fast libraries are missing."""
    missing = [what for what, there in (
        ('libturbojpeg 3 (decoding)', libturbojpeg.library()),
        ('cykooz-resizer (resizing)', cykooz_resizer)) if not there]
    if missing:
        _log.warning(
            'images are decoded and resized without %s, by Pillow, which is '
            "slower: pip install 'chainer_fp8pipe[images]'",
            ' and '.join(missing))


@functools.cache
def _pillow_files() -> dict[str, Any]:
    """Pillow's classes of files.

    These and not Image.open, which tries every format it knows and has a
    limit of its own on the number of pixels.
    """
    # Not with this module, which is imported before ranks know each other.
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        raise ImportError('images are decoded with Pillow: pip install '
                          "'chainer_fp8pipe[images]'") from None
    return {'JPEG': JpegImageFile, 'PNG': PngImageFile}


def _decode_with_pillow(data: bytes, kind: str, plan: Crop) -> numpy.ndarray:
    """Decodes the whole image, then crops and resizes."""
    left, top, width, height = plan.box
    shrink = shrink_for(plan) if kind == 'JPEG' else 1
    try:
        image = _pillow_files()[kind](io.BytesIO(data))
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        image.load()
        if image.mode.startswith('I'):
            # 16 bits of grey; Pillow's own conversion cuts off all above 255.
            grey = (numpy.asarray(image) >> 8).astype(numpy.uint8)
            pixels = numpy.repeat(grey[:, :, None], 3, axis=2)
        else:       # grey tripled, ink as light, transparency ignored
            pixels = numpy.asarray(image if image.mode == 'RGB'
                                   else image.convert('RGB'))
    except MemoryError:
        raise
    except Exception as error:      # the kinds that Pillow raises are many
        raise ImageError('', f'cannot be decoded: {error}') from error
    if shrink == 1:
        pixels = pixels[top:top + height, left:left + width]
    return resize(pixels, plan, shrink)


# --- resizing ----------------------------------------------------------------

def shrink_for(plan: Crop) -> int:
    """By which of 1, 2, 4 and 8 a decoder may shrink without loss."""
    (_, _, width, height), size = plan.box, plan.size
    return next((shrink for shrink in (8, 4, 2)
                 if width >= shrink * size[1] and height >= shrink * size[0]),
                1)


def resize(pixels: numpy.ndarray, plan: Crop, shrink: int = 1,
           left: int = 0, top: int = 0) -> numpy.ndarray:
    """Resizes and mirrors the part that a decoder gives.

    Args:
        pixels: The part alone or, if ``shrink`` is more than 1, the image
            shrunk by this factor without its first ``left`` columns and
            ``top`` rows; shape (H, W, 3), uint8, contiguous or not.
        plan: Its box is in pixels of the image.
        shrink: The decoder's factor.
        left: Shrunk columns that the decoder has left out.
        top: Shrunk rows that the decoder has left out.

    Returns:
        Shape ``(*plan.size, 3)``, uint8; maybe read-only.
    """
    box = None      # left, top, right, bottom; edges may lie within pixels
    if shrink > 1:
        x, y, width, height = plan.box
        box = (x / shrink - left, y / shrink - top,
               (x + width) / shrink - left, (y + height) / shrink - top)
    if box is None and pixels.shape[:2] == plan.size:
        result = pixels
    elif cykooz_resizer:
        result = _resize_fast(pixels, plan.size, box)
    else:
        from PIL import Image
        result = numpy.asarray(Image.fromarray(pixels).resize(
            plan.size[::-1], Image.Resampling.BILINEAR, box))
    return result[:, ::-1] if plan.flip else result


def _resize_fast(pixels: numpy.ndarray, size: tuple[int, int],
                 box: tuple[float, ...] | None) -> numpy.ndarray:
    if not hasattr(_local, 'resizer'):      # they have scratch space
        _local.resizer = (
            cykooz_resizer.Resizer(),
            cykooz_resizer.ResizeOptions(
                cykooz_resizer.ResizeAlg.convolution(
                    cykooz_resizer.FilterType.bilinear)))
    resizer, options = _local.resizer
    if box is not None:
        options = options.copy()
        options.crop_box = cykooz_resizer.CropBox(
            box[0], box[1], box[2] - box[0], box[3] - box[1])
    height, width = pixels.shape[:2]
    kind = cykooz_resizer.PixelType.U8x3
    source = cykooz_resizer.ImageData(width, height, kind, pixels.tobytes())
    result = cykooz_resizer.ImageData(size[1], size[0], kind)
    resizer.resize(source, result, options)
    return numpy.frombuffer(result.get_buffer(), numpy.uint8).reshape(
        *size, 3)
