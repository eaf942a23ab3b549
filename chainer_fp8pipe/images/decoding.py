"""Encoded images to pixels: only the part, and the size, that are needed."""
# Faults of a file are found in its head if they can be, where nothing is
# decoded: they then depend neither on the decoder nor on the part that is
# decoded.  libjpeg-turbo decodes the rows down to the lower edge of the part,
# and of these only the part's columns; Pillow decodes the whole image, but not
# more finely than needed.  A crop of 224 x 224 of a photograph of 150 kB takes
# 1.5 ms with the one, 2.0 with the other, and 2.9 as Image.open, convert and
# resize (one core of an AMD EPYC, 2026-11-25).  An index of the JPEG's codes,
# made once and kept with the file, would save another 0.3 ms; its 1,200 lines
# of C were not worth that.
from __future__ import annotations

import functools
import io
import logging
import struct
import threading
from typing import Any, NamedTuple

import numpy

from . import libturbojpeg, resizing
from .resizing import check_box, resize_part, shrink_for
from .transforms import Crop


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
#: Baseline, extended sequential and progressive, all with Huffman codes.
USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})


class Header(NamedTuple):
    """The head of a file; the last three numbers are 0 for PNG."""
    width: int              # pixels
    height: int
    kind: str               # 'JPEG' or 'PNG'
    frame: int = 0          # low byte of the frame's marker
    bits: int = 0           # of a sample
    components: int = 0     # of a pixel


def read_header(data: bytes, max_pixels: int) -> Header:
    """Reads the head of an image file.

    Raises:
        ImageError: The file is empty, neither JPEG nor PNG, has no image in
            it or one of more than ``max_pixels`` or, for JPEG, is cut short.
    """
    if not data:
        raise ImageError('', 'the file is empty')
    try:
        if data.startswith(b'\xff\xd8'):
            header = _of_jpeg(data)
        elif data.startswith(_PNG):
            width, height = struct.unpack_from('>II', data, 16)
            header = Header(width, height, 'PNG')
        else:
            raise ImageError('', 'is neither JPEG nor PNG: it starts with '
                             f'{data[:8]!r}')
    except (IndexError, struct.error):
        raise ImageError('', 'is cut short in its header') from None
    if not header.width or not header.height:
        raise ImageError('', f'has no pixels: its header says {header.width} '
                         f'x {header.height}')
    if header.width * header.height > max_pixels:
        # A small file can claim more than there is memory for.
        raise ImageError(
            '', f'is too large: {header.width} x {header.height} pixels, and '
            f'max_pixels={max_pixels:,} are allowed; make it smaller, or '
            'allow more in create_decoder')
    return header


def _of_jpeg(data: bytes) -> Header:
    """Walks from marker to marker up to the first scan."""
    header = None
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
            header = Header(width, height, 'JPEG', marker, bits, components)
        if marker in (_START_OF_SCAN, _END_OF_IMAGE[1]):
            break
        position += struct.unpack_from('>H', data, position)[0]
    if header is None or marker != _START_OF_SCAN:
        raise ImageError('', 'is a JPEG without an image')
    # No coded pixel contains this marker; a thumbnail in front of the scan
    # may.  A decoder that stops below the part that is wanted would not see.
    if data.rfind(_END_OF_IMAGE, position) < 0:
        raise ImageError('', 'is cut short: the end of the JPEG is missing')
    return header


# --- decoders ----------------------------------------------------------------

_log = logging.getLogger(__name__)

#: As Pillow has it: a quarter of a gigabyte of pixels.
MAX_PIXELS = 89_478_485

_NAMES = 'turbojpeg', 'pillow'
_told = threading.Event()


class Decoder:
    """Turns the bytes of one file into pixels, with Pillow.

    Every file is checked in the same way, whatever decodes it.  A decoder of
    one's own is any object that can be pickled and has ``size`` and
    ``decode``.

    Attributes:
        name: Makes an equal decoder with :func:`create_decoder`; never
            'auto'.
    """

    def __init__(self, name: str, max_pixels: int) -> None:
        self.name, self._max_pixels = name, max_pixels

    def __reduce__(self) -> tuple[Any, ...]:
        return create_decoder, (self.name, self._max_pixels)

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height, in pixels, from the header alone.

        Raises:
            ImageError: The file is not an image that can be used.
        """
        return read_header(data, self._max_pixels)[:2]

    def decode(self, data: bytes, plan: Crop) -> numpy.ndarray:
        """Decodes, crops, resizes and mirrors.

        Returns:
            Shape ``(*plan.size, 3)``, uint8: red, green, blue; maybe
            read-only.

        Raises:
            ImageError: The file is not an image that can be used.
            ValueError: ``plan.box`` is not inside the image.
        """
        header = read_header(data, self._max_pixels)
        check_box(plan, header.width, header.height)
        return self._decode(data, header, plan)

    def _decode(self, data: bytes, header: Header,
                plan: Crop) -> numpy.ndarray:
        return decode_with_pillow(data, header.kind, plan)


def create_decoder(name: str = 'auto',
                   max_pixels: int = MAX_PIXELS) -> Decoder:
    """A decoder of JPEG and PNG files, which several threads may use.

    Args:
        name: ``'turbojpeg'`` decodes with libjpeg-turbo 3 no more than the
            part that is needed.  ``'pillow'`` decodes the whole image with
            Pillow, but not more finely than needed.  ``'auto'`` is the
            former where its library is there, and otherwise the latter; the
            log names missing libraries once.
        max_pixels: Images of more pixels are errors.

    Raises:
        ValueError: There is no such decoder.
        RuntimeError: ``'turbojpeg'`` was asked for and is not there.
        ImportError: Pillow is not installed.
    """
    pillow_files()
    if name == 'auto':
        name = 'turbojpeg' if libturbojpeg.library() else 'pillow'
        _tell_what_is_missing()
    if name not in _NAMES:
        raise ValueError(f'no decoder {name!r}; there are '
                         f'{", ".join(["auto", *_NAMES])}')
    if name == 'turbojpeg' and libturbojpeg.library() is None:
        raise RuntimeError(
            f'the decoder {name!r} needs libturbojpeg 3: install '
            "chainer_fp8pipe[images], or use the decoder 'pillow'")
    kind = _Turbo if name == 'turbojpeg' else Decoder
    return kind(name, max_pixels)


class _Turbo(Decoder):
    """libjpeg-turbo for usual JPEGs, Pillow for what it does not decode."""

    def __init__(self, name: str, max_pixels: int) -> None:
        super().__init__(name, max_pixels)
        self._local = threading.local()

    def _decode(self, data: bytes, header: Header,
                plan: Crop) -> numpy.ndarray:
        # Four components are CMYK, which libjpeg-turbo does not convert.
        if header.frame in USUAL_FRAMES and header.bits == 8 \
                and header.components in (1, 3):
            if not hasattr(self._local, 'decompressor'):
                self._local.decompressor = libturbojpeg.Decompressor()
            shrink = shrink_for(plan)
            pixels = self._local.decompressor.decode(
                data, header.width, header.height, plan.box, shrink)
            if pixels is not None:
                return resize_part(pixels, plan, shrink,
                                   plan.box[0] // shrink,
                                   plan.box[1] // shrink)
        return super()._decode(data, header, plan)


def _tell_what_is_missing() -> None:
    """Logs once which fast libraries are missing."""
    missing = [what for what, there in (
        ('libturbojpeg 3 (decoding)', libturbojpeg.library()),
        ('cykooz-resizer (resizing)', resizing.FAST)) if not there]
    if missing and not _told.is_set():
        _told.set()
        _log.warning(
            'images are decoded and resized without %s, by Pillow, which is '
            "slower: pip install 'chainer_fp8pipe[images]'",
            ' and '.join(missing))


# --- Pillow ------------------------------------------------------------------

@functools.cache
def pillow_files() -> dict[str, Any]:
    """Pillow's classes of files.

    These and not Image.open, which tries every format it knows and has a
    limit of its own on the number of pixels.

    Raises:
        ImportError: Pillow is not installed.
    """
    # Not with this module, which is imported before ranks know each other.
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        raise ImportError('images are decoded with Pillow: pip install '
                          "'chainer_fp8pipe[images]'") from None
    return {'JPEG': JpegImageFile, 'PNG': PngImageFile}


def decode_with_pillow(data: bytes, kind: str, plan: Crop) -> numpy.ndarray:
    """Decodes the whole image, then crops and resizes.

    A JPEG that is at least twice as large as needed, both ways, is shrunk as
    it is decoded.  Returns and raises as :meth:`~.decode.Decoder.decode`.
    """
    left, top, width, height = plan.box
    shrink = shrink_for(plan) if kind == 'JPEG' else 1
    try:
        image = pillow_files()[kind](io.BytesIO(data))
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        pixels = _rgb(image)
    except MemoryError:
        raise
    except Exception as error:      # the kinds that Pillow raises are many
        raise ImageError('', f'cannot be decoded: {error}') from error
    if shrink == 1:
        pixels = pixels[top:top + height, left:left + width]
    return resize_part(pixels, plan, shrink)


def _rgb(image: Any) -> numpy.ndarray:
    """(H, W, 3) uint8: grey tripled, ink as light, transparency ignored."""
    image.load()
    if image.mode.startswith('I'):
        # 16 bits of grey; Pillow's own conversion cuts off all above 255.
        grey = (numpy.asarray(image) >> 8).astype(numpy.uint8)
        return numpy.repeat(grey[:, :, None], 3, axis=2)
    return numpy.asarray(image if image.mode == 'RGB'
                         else image.convert('RGB'))
