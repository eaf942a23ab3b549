"""Resizes pixels: bilinear over the area that each new pixel covers.

The definition is Pillow's ``BILINEAR``: a triangle as wide as one pixel of
the coarser of the two grids, so that shrinking averages and nothing is
skipped.  ``cykooz_resizer`` computes the same with vector instructions, about
four times as fast; single values differ by 1 of 255, very few by 2, as both
round twice.
"""
from __future__ import annotations

import threading

import numpy

from .transforms import Crop

try:
    import cykooz_resizer
except ImportError:
    cykooz_resizer = None

#: Whether the fast library is there.
FAST = cykooz_resizer is not None

_local = threading.local()      # the fast library's objects have scratch space

Box = tuple[float, float, float, float]


def crop_and_resize(pixels: numpy.ndarray, plan: Crop) -> numpy.ndarray:
    """Crops, resizes and mirrors a decoded image of shape (H, W, 3), uint8.

    Returns:
        Shape ``(*plan.size, 3)``, uint8; maybe read-only.
    """
    check_box(plan, pixels.shape[1], pixels.shape[0])
    left, top, width, height = plan.box
    return resize_part(pixels[top:top + height, left:left + width], plan)


def resize_part(pixels: numpy.ndarray, plan: Crop, shrink: int = 1,
                left: int = 0, top: int = 0) -> numpy.ndarray:
    """Resizes and mirrors the part that a decoder gives.

    Args:
        pixels: The part alone or, if ``shrink`` is more than 1, the image
            shrunk by this factor without its first ``left`` columns and
            ``top`` rows.
        plan: Its box is in pixels of the image.
        shrink: The decoder's factor.
        left: Shrunk columns that the decoder has left out.
        top: Shrunk rows that the decoder has left out.
    """
    box = None
    if shrink > 1:
        x, y, width, height = plan.box
        box = (x / shrink - left, y / shrink - top,
               (x + width) / shrink - left, (y + height) / shrink - top)
    result = resize(pixels, plan.size, box)
    return result[:, ::-1] if plan.flip else result


def resize(pixels: numpy.ndarray, size: tuple[int, int],
           box: Box | None = None) -> numpy.ndarray:
    """Resizes ``box`` of ``pixels``, which need not be contiguous.

    Args:
        pixels: Of shape (H, W, 3), uint8.
        size: Height and width of the result.
        box: Left, top, right and bottom, in pixels, of the part that is
            resized; edges may lie within pixels.  By default the whole.

    Returns:
        Shape ``(*size, 3)``, uint8; it shares nothing with ``pixels``, and
        may be read-only.
    """
    if box is None and pixels.shape[:2] == size:
        return pixels.copy()
    return (_resize_fast if FAST else _resize_with_pillow)(pixels, size, box)


def check_box(plan: Crop, width: int, height: int) -> None:
    """Raises ValueError unless ``plan.box`` is inside the image."""
    left, top, w, h = plan.box
    if left < 0 or top < 0 or w < 1 or h < 1 \
            or left + w > width or top + h > height:
        raise ValueError(f'the part (left, top, width, height) = {plan.box} '
                         f'is not inside an image of {width} x {height}')


def shrink_for(plan: Crop) -> int:
    """By which of 1, 2, 4 and 8 a decoder may shrink without loss."""
    (_, _, width, height), size = plan.box, plan.size
    return next((shrink for shrink in (8, 4, 2)
                 if width >= shrink * size[1] and height >= shrink * size[0]),
                1)


def _resize_fast(pixels: numpy.ndarray, size: tuple[int, int],
                 box: Box | None) -> numpy.ndarray:
    if not hasattr(_local, 'fast'):
        _local.fast = (
            cykooz_resizer.Resizer(),
            cykooz_resizer.ResizeOptions(
                cykooz_resizer.ResizeAlg.convolution(
                    cykooz_resizer.FilterType.bilinear)))
    resizer, options = _local.fast
    height, width = pixels.shape[:2]
    if box is not None:
        options = options.copy()
        options.crop_box = cykooz_resizer.CropBox(
            box[0], box[1], box[2] - box[0], box[3] - box[1])
    source = cykooz_resizer.ImageData(
        width, height, cykooz_resizer.PixelType.U8x3, pixels.tobytes())
    result = cykooz_resizer.ImageData(
        size[1], size[0], cykooz_resizer.PixelType.U8x3)
    resizer.resize(source, result, options)
    return numpy.frombuffer(result.get_buffer(), numpy.uint8).reshape(
        *size, 3)


def _resize_with_pillow(pixels: numpy.ndarray, size: tuple[int, int],
                        box: Box | None) -> numpy.ndarray:
    from PIL import Image
    return numpy.asarray(Image.fromarray(pixels).resize(
        size[::-1], Image.Resampling.BILINEAR, box))
