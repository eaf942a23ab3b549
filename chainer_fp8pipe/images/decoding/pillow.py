"""Decodes any JPEG or PNG with Pillow."""
from __future__ import annotations

import functools
import io
from typing import Any

import numpy

from ..bad_image import ImageError
from ..transforms import Crop
from .resizing import resize_part, shrink_for


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
