"""Small folders of images in which every sample can be told from others."""
from __future__ import annotations

import os

from chainer_fp8pipe.images.transforms import RandomResizedCrop

import numpy
from PIL import Image


def make_folder(root, count=12, classes=3, size=(24, 20), step=1):
    """``count`` images; returns ``root`` as a string.

    Red is the sample's number, times ``step``, everywhere, which no crop
    changes; green grows to the right and blue downwards, which shows the
    crop.
    """
    height, width = size
    for sample in range(count):
        pixels = numpy.empty((height, width, 3), numpy.uint8)
        pixels[..., 0] = sample * step
        pixels[..., 1] = numpy.linspace(0, 255, width)
        pixels[..., 2] = numpy.linspace(0, 255, height)[:, None]
        folder = os.path.join(root, f'class{sample * classes // count}')
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(pixels).save(
            os.path.join(folder, f'{sample:03}.png'))
    return str(root)


def crop(size=8):
    """A random crop that leaves bytes."""
    return RandomResizedCrop(size, normalise=None)


def numbers(batch):
    """Which samples of :func:`make_folder` are in a batch."""
    return [int(image[0, 0, 0]) for image, _ in batch]


def stream(iterator, batches):
    """Copies of some batches: images, and labels."""
    found = [next(iterator) for _ in range(batches)]
    return ([numpy.stack([image for image, _ in batch]) for batch in found],
            [[int(label) for _, label in batch] for batch in found])


def spoil(path):
    """Leaves a file that is not an image."""
    with open(path, 'wb') as file:
        file.write(b'no image')


class Broken:
    """A transform with a mistake in it."""

    shape, dtype = (3, 8, 8), numpy.dtype(numpy.uint8)

    def __init__(self, text='a mistake'):
        self.text = text

    def plan(self, width, height, rng):
        raise KeyError(self.text)

    def finish(self, pixels, out=None):
        raise AssertionError
