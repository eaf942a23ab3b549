"""Encoded images to pixels: only the part, and the size, that are needed."""
# A transform draws its part from the size alone, which stands in the file's
# head: so a decoder asks for the part when it has read the head.
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
# All three release the interpreter while they compute, so that threads decode
# at the same time.
from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
from collections.abc import Callable, Iterator

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


# --- decoders ----------------------------------------------------------------

class Decoder:
    """Turns the bytes of one file into pixels.

    A decoder of one's own is any object that has ``decode``, which several
    threads call.

    Args:
        name: ``'turbojpeg'`` decodes only the part of a JPEG that is needed,
            with libjpeg-turbo 3, and other files as ``'pillow'`` does, which
            decodes the whole image, only as finely as needed.  ``'auto'``
            takes ``'turbojpeg'`` if its library is there; the log names
            missing libraries once.

    Raises:
        ValueError: There is no such decoder.
        RuntimeError: ``'turbojpeg'`` was asked for and is not there.
        ImportError: Pillow is not installed.
    """

    def __init__(self, name: str = 'auto') -> None:
        from PIL import Image  # not with this module, which all ranks import
        self._open = functools.partial(Image.open, formats=('JPEG', 'PNG'))
        if name not in ('auto', 'turbojpeg', 'pillow'):
            raise ValueError(f'no decoder {name!r}; there are auto, '
                             'turbojpeg, pillow')
        if name == 'turbojpeg' and libturbojpeg.library() is None:
            raise RuntimeError(
                f'the decoder {name!r} needs libturbojpeg 3: install '
                "chainer_fp8pipe[images], or use the decoder 'pillow'")
        if name == 'auto':
            _tell_what_is_missing()
        self._is_fast = name != 'pillow' and libturbojpeg.library() is not None

    def decode(self, data: bytes, choose: Callable[[int, int], Crop]
               ) -> numpy.ndarray:
        """Decodes, crops, resizes and mirrors.

        Args:
            data: The file, JPEG or PNG.
            choose: Returns the part, for the width and height in pixels.

        Returns:
            Shape ``(*size, 3)`` for the size of the part, uint8: red, green,
            blue; maybe read-only.

        Raises:
            ImageError: The file is not an image that can be used.
            ValueError: The part is not inside the image.
        """
        def checked(width: int, height: int) -> tuple[Crop, int]:
            """The part, and the factor to shrink by."""
            if width * height > MAX_PIXELS:
                # A small file can claim more than there is memory for.
                raise ImageError(
                    '', f'is too large: {width} x {height} pixels, and '
                    f'{MAX_PIXELS:,} are allowed; make it smaller')
            plan = choose(width, height)
            left, top, w, h = plan.box
            if left < 0 or top < 0 or w < 1 or h < 1 \
                    or left + w > width or top + h > height:
                raise ValueError(
                    f'the part (left, top, width, height) = {plan.box} is '
                    f'not inside an image of {width} x {height}')
            return plan, shrink_for(plan)
        is_jpeg = data.startswith(b'\xff\xd8')
        if not is_jpeg and not data.startswith(b'\x89PNG'):
            raise ImageError('', 'is neither JPEG nor PNG: it starts with '
                             f'{data[:8]!r}')
        if is_jpeg and self._is_fast and (
                found := libturbojpeg.decode(data, checked)):
            pixels, (plan, shrink) = found
            return resize(pixels, plan, shrink, plan.box[0] // shrink,
                          plan.box[1] // shrink)
        return self._with_pillow(data, is_jpeg, checked)

    def _with_pillow(self, data: bytes, is_jpeg: bool,
                     checked: Callable[[int, int], tuple[Crop, int]]
                     ) -> numpy.ndarray:
        """Decodes the whole image, then crops and resizes."""
        with _as_image_error():
            image = self._open(io.BytesIO(data))
        plan, shrink = checked(*image.size)
        shrink = shrink if is_jpeg else 1
        with _as_image_error():
            if shrink > 1:
                image.draft(None, (image.width // shrink,
                                   image.height // shrink))
            pixels = _of_three_colours(image)
        left, top, width, height = plan.box
        if shrink == 1:
            pixels = pixels[top:top + height, left:left + width]
        return resize(pixels, plan, shrink)


@contextlib.contextmanager
def _as_image_error() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:      # the kinds that Pillow raises are many
        raise ImageError('', f'cannot be decoded: {error}') from error


def _of_three_colours(image):
    """An image's pixels: grey tripled, ink as light, no transparency."""
    image.load()
    if image.mode.startswith('I'):
        # 16 bits of grey; Pillow's own conversion cuts off all above 255.
        grey = (numpy.asarray(image) >> 8).astype(numpy.uint8)
        return numpy.repeat(grey[:, :, None], 3, axis=2)
    return numpy.asarray(image if image.mode == 'RGB'
                         else image.convert('RGB'))


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
    # Left, top, width, height; edges may lie within pixels.
    box = 0.0, 0.0, float(pixels.shape[1]), float(pixels.shape[0])
    if shrink > 1:
        x, y, width, height = plan.box
        box = (x / shrink - left, y / shrink - top, width / shrink,
               height / shrink)
    if shrink == 1 and pixels.shape[:2] == plan.size:
        result = pixels
    elif cykooz_resizer:
        result = _resize_fast(pixels, plan.size, box)
    else:
        from PIL import Image
        result = numpy.asarray(Image.fromarray(pixels).resize(
            plan.size[::-1], Image.Resampling.BILINEAR,
            (box[0], box[1], box[0] + box[2], box[1] + box[3])))
    return result[:, ::-1] if plan.flip else result


def _resize_fast(pixels: numpy.ndarray, size: tuple[int, int],
                 box: tuple[float, float, float, float]) -> numpy.ndarray:
    if not hasattr(_local, 'resizer'):      # they have scratch space
        _local.resizer = (
            cykooz_resizer.Resizer(),
            cykooz_resizer.ResizeOptions(
                cykooz_resizer.ResizeAlg.convolution(
                    cykooz_resizer.FilterType.bilinear)))
    resizer, options = _local.resizer
    options = options.copy()
    options.crop_box = cykooz_resizer.CropBox(*box)
    height, width = pixels.shape[:2]
    kind = cykooz_resizer.PixelType.U8x3
    source = cykooz_resizer.ImageData(width, height, kind, pixels.tobytes())
    result = cykooz_resizer.ImageData(size[1], size[0], kind)
    resizer.resize(source, result, options)
    return numpy.frombuffer(result.get_buffer(), numpy.uint8).reshape(
        *size, 3)
