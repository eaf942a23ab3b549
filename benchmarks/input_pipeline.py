"""How fast images become batches, and what a partial decode costs.

    .venv/bin/python benchmarks/input_pipeline.py

builds a folder of JPEG photographs (photographs.py) and reads it as training
would: random resized crops of 224 x 224 pixels, mirrored and normalised.  It
prints the processor time and the error of each decoder beside Pillow's, which
decodes the whole image, and the images per second with 1 worker and with all.
"""
from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from unittest import mock

from chainer_fp8pipe.images import ImageFolder, decoding
from chainer_fp8pipe.images.decoding import decode
from chainer_fp8pipe.images.transforms import RandomResizedCrop

import numpy
from environment import describe, parser
from photographs import build
from PIL import Image

#: That are measured, each time.
EPOCHS = 3


def decode_whole(data, choose):
    """The whole image, cropped and resized, by Pillow alone."""
    image = Image.open(io.BytesIO(data))
    plan = choose(*image.size)
    left, top, width, height = plan.box
    pixels = numpy.asarray(image.convert('RGB').resize(
        plan.size[::-1], Image.Resampling.BILINEAR,
        (left, top, left + width, top + height)))
    return pixels[:, ::-1] if plan.flip else pixels


def parse():
    given = parser(__doc__)
    given.add_argument('--images', type=int, default=2000)
    given.add_argument('--workers', type=int, default=os.cpu_count(),
                       help='(default: processors)')
    return given.parse_args()


def decoders(options, paths):
    """Prints milliseconds of processor time of an image, and errors.

    Decoders take turns over all images, as each image's codes would be known
    to the processor after a few times.
    """
    files = [path.read_bytes() for path in paths]
    rng, transform = numpy.random.default_rng(0), RandomResizedCrop(224)
    plans = [transform.plan(*Image.open(io.BytesIO(data)).size, rng)
             for data in files]
    found = {'Pillow, whole': decode_whole, 'pillow': mock.patch.object(
        decoding, 'library', bool)(decode), 'turbojpeg': decode}

    def decoded(decoder, number):
        return decoder(files[number], lambda *size: plans[number])
    seconds = {name: [] for name in found}
    for _ in range(EPOCHS):
        for name, decoder in found.items():
            start = time.process_time()
            for number in range(len(files)):
                decoded(decoder, number)
            seconds[name].append(time.process_time() - start)
    for name, decoder in found.items():
        errors = [numpy.abs(
            decoded(decoder, number).astype('i2')
            - decoded(found['Pillow, whole'], number)).mean()
            for number in range(min(300, len(files)))]
        each = 1e3 * statistics.median(seconds[name]) / len(files)
        print(f'{name:18}{each:14.3f}{numpy.mean(errors):14.3f}'
              f'{max(errors):14.3f}', flush=True)


def rate(options, root, workers):
    """Images per second of epochs after the first, which fills the cache."""
    iterator = ImageFolder(root, RandomResizedCrop(224)).iterator(
        64, workers=workers)
    seconds = []
    for _ in range(EPOCHS + 1):
        start = time.perf_counter()
        next(iterator)
        while not iterator.is_new_epoch:
            next(iterator)
        seconds.append(time.perf_counter() - start)
    iterator.finalize()
    return options.images / statistics.median(seconds[1:])


def main():
    options = parse()
    print(describe())
    with tempfile.TemporaryDirectory() as root:
        paths = build(root, options.images)
        size = sum(path.stat().st_size for path in paths)
        print(f'{len(paths)} photographs, {size / len(paths) / 1e3:.0f} kB '
              'in the mean; processor time of decoding, cropping and '
              'resizing\n'
              f'{"":18}{"ms an image":>14}{"mean error":>14}'
              f'{"worst":>14}')
        decoders(options, paths)
        rates = {workers: rate(options, root, workers)
                 for workers in (1, options.workers)}
    for workers, found in rates.items():
        print(f'{workers} workers: {found:.0f} images/s')


if __name__ == '__main__':
    main()
