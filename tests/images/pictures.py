"""Encoded pictures for the tests of decoding."""
from __future__ import annotations

import functools
import io
from importlib.util import find_spec

import numpy
from PIL import Image


@functools.cache
def photograph():
    """A real photograph, (427, 640, 3) uint8."""
    # Importing scikit-learn would take seconds.
    folder, = find_spec('sklearn').submodule_search_locations
    return numpy.asarray(Image.open(f'{folder}/datasets/images/china.jpg'))


def jpeg(pixels, mode=None, **options):
    """The bytes of a JPEG of (H, W[, 3]) uint8 pixels."""
    return _encoded(pixels, 'JPEG', mode, {'quality': 90, **options})


def png(pixels, mode=None, **options):
    """The bytes of a PNG."""
    return _encoded(pixels, 'PNG', mode, options)


def reference(data, plan):
    """What a plan gives, with nothing but Pillow's own crop and resize."""
    left, top, width, height = plan.box
    image = Image.open(io.BytesIO(data)).convert('RGB').crop(
        (left, top, left + width, top + height)).resize(
            plan.size[::-1], Image.Resampling.BILINEAR)
    if plan.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return numpy.asarray(image)


def difference(first, second):
    """Absolute differences of two uint8 arrays of one shape."""
    assert first.shape == second.shape
    return numpy.abs(first.astype(int) - second.astype(int))


def _encoded(pixels, kind, mode, options):
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()
