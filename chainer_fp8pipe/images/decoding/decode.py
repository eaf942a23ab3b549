"""Encoded images to pixels: only the part, and the size, that are needed."""
from __future__ import annotations

import logging
import threading
from typing import Any

import numpy

from ..jpeg.jpeg_index import JpegIndex, JpegPart
from ..transforms import Crop
from . import libturbojpeg, resizing
from .header import USUAL_FRAMES, Header, check_pixels, read_header
from .pillow import decode_with_pillow, pillow_files
from .resizing import check_box, crop_and_resize, resize_part, shrink_for

_log = logging.getLogger(__name__)

#: As Pillow has it: a quarter of a gigabyte of pixels.
MAX_PIXELS = 89_478_485

_WHOLE = '-whole'
_NAMES = [base + end for base in ('turbojpeg', 'pillow')
          for end in ('', _WHOLE)]
_told = threading.Event()


class Decoder:
    """Turns the bytes of one file into pixels, with Pillow.

    Every file is checked in the same way, whatever decodes it.  A decoder of
    one's own is any object that can be pickled and has ``size`` and
    ``decode``, and maybe ``index`` and ``decode_indexed``.

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
        if not self.name.endswith(_WHOLE):
            return self._decode(data, header, plan)
        whole = Crop((0, 0, header.width, header.height),
                     (header.height, header.width))
        return crop_and_resize(self._decode(data, header, whole), plan)

    def index(self, data: bytes) -> JpegIndex | None:
        """An index with which parts of this file decode faster, or None.

        Raises nothing for a file that cannot be used.
        """
        return None

    def decode_indexed(self, data: bytes | memoryview, index: JpegIndex,
                       plan: Crop) -> numpy.ndarray:
        """The result of :meth:`decode`, found faster if this can use it."""
        return self.decode(bytes(data), plan)

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
            log names missing libraries once.  ``'turbojpeg-whole'`` and
            ``'pillow-whole'`` decode the whole image, then crop and resize
            it, as a reference for the others.
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
    base = name.removesuffix(_WHOLE)
    if base == 'turbojpeg' and libturbojpeg.library() is None:
        raise RuntimeError(
            f'the decoder {name!r} needs libturbojpeg 3: install '
            "chainer_fp8pipe[images], or use the decoder 'pillow'")
    kind = _Turbo if base == 'turbojpeg' else Decoder
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
            pixels = self._decode_part(JpegPart(
                data, header.width, header.height, plan.box), plan)
            if pixels is not None:
                return pixels
        return super()._decode(data, header, plan)

    def index(self, data: bytes) -> JpegIndex | None:
        whole = self.name.endswith(_WHOLE)
        return None if whole else JpegIndex.of(data)

    def decode_indexed(self, data: bytes | memoryview, index: JpegIndex,
                       plan: Crop) -> numpy.ndarray:
        check_pixels(*index.size, self._max_pixels)
        check_box(plan, *index.size)
        part = (index.cut(data, plan.box, shrink_for(plan))
                or JpegPart(data, *index.size, plan.box))
        pixels = self._decode_part(part, plan)
        return self.decode(bytes(data), plan) if pixels is None else pixels

    def _decode_part(self, part: JpegPart, plan: Crop) -> numpy.ndarray | None:
        """Decodes, resizes and mirrors; None if the library cannot."""
        if not hasattr(self._local, 'decompressor'):
            self._local.decompressor = libturbojpeg.Decompressor()
        shrink = shrink_for(plan)
        pixels = self._local.decompressor.decode(*part, shrink)
        if pixels is None:
            return None
        return resize_part(pixels, plan, shrink, plan.box[0] // shrink,
                           plan.box[1] // shrink)


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
