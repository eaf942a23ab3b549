"""A folder of JPEG photographs, as large and as different as ImageNet's.

    .venv/bin/python benchmarks/photographs.py ROOT --images 1000

writes ROOT/CLASS/NUMBER.JPEG.  Every image is cut from one of scikit-learn's
two sample photographs, so nothing is fetched.  Sizes, shapes, compression and
chroma subsampling are drawn so that the means are near those given for
ImageNet's training images (480 x 420 pixels, 110 kB).  A class is one
photograph in one cast of colour, so that a small network can learn it.
Images that are larger than a photograph continue it mirrored, not enlarged:
enlarged ones would compress, and decode, far too well.
"""
from __future__ import annotations

import argparse
import pathlib

import numpy
from PIL import Image

_NAMES = ('china', 'flower')
# Factors of red, green and blue.
_CASTS = ((1, 1, 1), (1, .6, .6), (.6, 1, .6), (.6, .6, 1), (1, 1, .5))
_SUBSAMPLINGS = ('4:2:0', '4:2:2', '4:4:4')


def build(root, images=1000, classes=10, seed=0, scale=1.0):
    """Writes the images; the same arguments give the same bytes.

    Args:
        root: The folder; it may exist, and is made if it does not.
        images: How many, over all classes; each class gets an equal share,
            or one more.
        classes: How many, 1 to 10.
        seed: Of everything that is drawn.
        scale: Images are resized by this; tests and examples want small
            ones.

    Returns:
        The paths of the images, :class:`pathlib.Path`.
    """
    if not 1 <= classes <= len(_NAMES) * len(_CASTS):
        raise ValueError(f'1 to {len(_NAMES) * len(_CASTS)} classes, '
                         f'not {classes}')
    rng = numpy.random.default_rng(seed)
    photographs = _photographs()
    paths = []
    for number in range(images):
        label = number % classes
        name, cast = _NAMES[label % 2], _CASTS[label // 2]
        folder = pathlib.Path(root) / f'{name}_{label // 2}'
        folder.mkdir(parents=True, exist_ok=True)
        size = draw_size(rng)
        pixels = _cut(photographs[name], *size, rng) * cast
        image = Image.fromarray(pixels.astype(numpy.uint8))
        if scale != 1:
            image = image.resize([max(8, round(side * scale))
                                  for side in size])
        path = folder / f'{number:06d}.JPEG'
        image.save(path, 'JPEG', **_compression(rng))
        paths.append(path)
    return paths


def draw_size(rng):
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


def _compression(rng):
    return {
        'quality': int(rng.choice([85, 92, 95, 96, 98])),
        'subsampling': str(rng.choice(_SUBSAMPLINGS, p=[0.7, 0.15, 0.15])),
        'progressive': bool(rng.random() < 0.03),
    }


def _photographs():
    from sklearn.datasets import load_sample_image
    return {name: load_sample_image(f'{name}.jpg') for name in _NAMES}


def _cut(photograph, width, height, rng):
    """A random part of so many pixels, continued mirrored where needed."""
    tall, wide = photograph.shape[:2]
    padding = [(0, max(0, height - tall)), (0, max(0, width - wide)), (0, 0)]
    pixels = numpy.pad(photograph, padding, 'symmetric')
    top = rng.integers(pixels.shape[0] - height + 1)
    left = rng.integers(pixels.shape[1] - width + 1)
    return pixels[top:top + height, left:left + width]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', metavar='ROOT')
    parser.add_argument('--images', type=int, default=1000)
    parser.add_argument('--classes', type=int, default=10)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--scale', type=float, default=1.0,
                        help='of the sides (default: 1)')
    options = parser.parse_args()
    paths = build(options.root, options.images, options.classes,
                  options.seed, options.scale)
    sizes = numpy.array([Image.open(path).size for path in paths])
    size = sum(path.stat().st_size for path in paths) / len(paths)
    print(f'{len(paths)} images in {options.root}, of '
          f'{sizes[:, 0].mean():.0f} x {sizes[:, 1].mean():.0f} pixels and '
          f'{size / 1e3:.0f} kB in the mean')


if __name__ == '__main__':
    main()
