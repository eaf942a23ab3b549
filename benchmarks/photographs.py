"""A folder of JPEG photographs, as large and as different as ImageNet's.

Every image is cut from one of scikit-learn's two sample photographs, so
nothing is fetched.  Sizes, shapes, compression and chroma subsampling are
drawn so that the means are near those given for ImageNet's training images
(480 x 420 pixels, 110 kB).  Images that are larger than a photograph continue
it mirrored, not enlarged: enlarged ones would compress, and decode, far too
well.
"""
from __future__ import annotations

import pathlib

import numpy
from PIL import Image


def build(root, images, seed=0):
    """Writes ``root/CLASS/NUMBER.JPEG``; the same arguments, the same bytes.

    Returns:
        The paths of the images, :class:`pathlib.Path`.
    """
    from sklearn.datasets import load_sample_image
    rng = numpy.random.default_rng(seed)
    paths = []
    for number in range(images):
        name = ('china', 'flower')[number % 2]
        path = pathlib.Path(root) / name / f'{number:06d}.JPEG'
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = _cut(load_sample_image(f'{name}.jpg'), *_size(rng), rng)
        Image.fromarray(pixels).save(
            path, quality=int(rng.choice([85, 92, 95, 96, 98])),
            subsampling=str(rng.choice(['4:2:0', '4:2:2', '4:4:4'],
                                       p=[0.7, 0.15, 0.15])),
            progressive=bool(rng.random() < 0.03))
        paths.append(path)
    return paths


def _size(rng):
    """Width and height of one image, distributed about as ImageNet's."""
    kind = rng.random()
    if kind < 0.72:
        long = 500
    elif kind < 0.90:
        long = int(rng.integers(130, 500))
    else:
        long = round(500 * 2 ** rng.uniform(0.2, 1.8))
    ratio = (rng.uniform(0.6, 1) if rng.random() < 0.2
             else rng.choice([3 / 4, 2 / 3, 1], p=[0.7, 0.2, 0.1]))
    sides = long, round(long * ratio)
    return sides if rng.random() < 0.75 else sides[::-1]


def _cut(photograph, width, height, rng):
    """A random part of so many pixels, continued mirrored where needed."""
    tall, wide = photograph.shape[:2]
    padding = [(0, max(0, height - tall)), (0, max(0, width - wide)), (0, 0)]
    pixels = numpy.pad(photograph, padding, 'symmetric')
    top = rng.integers(pixels.shape[0] - height + 1)
    left = rng.integers(pixels.shape[1] - width + 1)
    return numpy.ascontiguousarray(
        pixels[top:top + height, left:left + width])
