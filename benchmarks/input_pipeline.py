"""What each part of the input pipeline brings: images per second without it.

    .venv/bin/python benchmarks/input_pipeline.py --json FILE

builds a folder of JPEG photographs (photographs.py) and reads it as training
would: random resized crops of 224 x 224 pixels, mirrored and normalised.
Each of the four optimisations is removed, and used alone:

    cache     without it, every epoch reads every file; files are dropped
              from the system's own cache before each epoch, as those of a
              data set larger than memory would be
    prefetch  without it, a batch is read when it is wanted
    fused     decode no more than the crop needs; without it, Pillow decodes
              the whole image, then crops and resizes it
    workers   as many as given; without them, one

``alone`` is the rate at which batches come when they are taken at once.
``training`` is the rate with a step after each batch that takes as long as
the input takes with everything, and leaves the processors alone, as a GPU
would (it sleeps); ``waiting`` is the part of the time for which such a step
waits for its batch.  Figures are medians of epochs after the first.
"""
from __future__ import annotations

import functools
import io
import os
import pathlib
import statistics
import tempfile
import time

from chainer_fp8pipe.images import ImageFolder
from chainer_fp8pipe.images.decoding import create_decoder
from chainer_fp8pipe.images.transforms import RandomResizedCrop
from chainer_fp8pipe.report.quantities import bytes_in

import numpy
from environment import describe, parser, write_json
from photographs import build
from PIL import Image

PARTS = ('cache', 'prefetch', 'fused', 'workers')
DECODERS = 'turbojpeg', 'pillow'
PLAIN = 'Image.open, crop'


class PlainPillow:
    """The whole image, cropped and resized, by Pillow alone."""

    def decode(self, data, choose):
        image = Image.open(io.BytesIO(data))
        plan = choose(*image.size)
        left, top, width, height = plan.box
        pixels = numpy.asarray(image.convert('RGB').resize(
            plan.size[::-1], Image.Resampling.BILINEAR,
            (left, top, left + width, top + height)))
        return pixels[:, ::-1] if plan.flip else pixels


def parse():
    given = parser(__doc__)
    given.add_argument('--root', help='a folder of images that is there')
    given.add_argument('--images', type=int, default=2000)
    given.add_argument('--batch', type=int, default=64)
    given.add_argument('--workers', type=int, default=os.cpu_count(),
                       help='(default: processors)')
    given.add_argument('--prefetch', type=int, default=8)
    given.add_argument('--epochs', type=int, default=3,
                       help='that are measured, each time (default: 3)')
    return given.parse_args()


class Pipeline:
    """A folder's iterator, with some of the parts.

    Args:
        options: Of the command line.
        root: The folder.
        parts: Those of ``PARTS`` that are used.
        workers: How many, if that part is used; as in ``options`` if not
            said.
    """

    def __init__(self, options, root, parts=PARTS, workers=None):
        self.cached = 'cache' in parts
        dataset = ImageFolder(
            root, RandomResizedCrop(224),
            cache='memory' if self.cached else None,
            decoder='auto' if 'fused' in parts else PlainPillow())
        self.paths = [dataset.path(i) for i in range(len(dataset))]
        self.iterator = dataset.iterator(
            options.batch,
            workers=(workers or options.workers) if 'workers' in parts else 1,
            prefetch=options.prefetch if 'prefetch' in parts else 0)
        self.epoch(0)           # the cache is full, the workers are awake

    def epoch(self, step):
        """Seconds of an epoch, and of waiting, with steps of ``step`` s.

        The first batches are there already, as they are in mid-training;
        so they are for the next epoch when this one ends.
        """
        if not self.cached:
            forget(self.paths)
        start, waiting = time.perf_counter(), 0.0
        while True:
            wanted = time.perf_counter()
            next(self.iterator)
            waiting += time.perf_counter() - wanted
            if step:
                time.sleep(step)
            if self.iterator.is_new_epoch:
                return time.perf_counter() - start, waiting


def forget(paths):
    """Asks the system to drop files from its cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def choices():
    """Name to parts, in the order of the table."""
    return {'everything': PARTS,
            **{f'without {part}': tuple(p for p in PARTS if p != part)
               for part in PARTS},
            **{f'only {part}': (part,) for part in PARTS},
            'nothing': ()}


def ablation(options, root):
    """Per choice: rates alone and in training, share of waiting."""
    rows, step = {}, None
    for name, parts in choices().items():
        pipeline = Pipeline(options, root, parts)
        images = len(pipeline.paths)
        alone = statistics.median(
            pipeline.epoch(0)[0] for _ in range(options.epochs))
        if step is None:
            step = alone / pipeline.iterator.batches_per_epoch
        epochs = [pipeline.epoch(step) for _ in range(options.epochs)]
        pipeline.iterator.finalize()
        rows[name] = {
            'alone': images / alone,
            'training': images / statistics.median(s for s, _ in epochs),
            'waiting': statistics.median(w / s for s, w in epochs)}
        print(f'{name:18}{rows[name]["alone"]:12.0f}'
              f'{rows[name]["training"]:12.0f}'
              f'{100 * rows[name]["waiting"]:11.1f} %', flush=True)
    return {'step': step, 'rows': rows}


def worker_counts(options, root):
    """Images per second with 1, 2, 4, ... workers."""
    counts = [2 ** k for k in range(10) if 2 ** k <= max(2, options.workers)]
    rates = {}
    for count in counts:
        pipeline = Pipeline(options, root, workers=count)
        seconds = statistics.median(
            pipeline.epoch(0)[0] for _ in range(options.epochs))
        pipeline.iterator.finalize()
        rates[count] = len(pipeline.paths) / seconds
        print(f'{count:4} workers{rates[count]:10.0f} images/s'
              f'{rates[count] / rates[1]:10.2f} x one', flush=True)
    return rates


def memory(options, root):
    """Bytes after the first epoch, and after each of three more."""
    pipeline = Pipeline(options, root)
    found = [bytes_in('VmRSS')]
    for _ in range(3):
        pipeline.epoch(0)
        found.append(bytes_in('VmRSS'))
    pipeline.iterator.finalize()
    print('after epochs 1 to 4: ' + ', '.join(
        f'{number / 1e6:.1f}' for number in found) + ' MB')
    return found


def decoders(options, root):
    """Milliseconds of processor time per image; gains; errors.

    Decoders take turns over all images, as each image's codes would be known
    to the processor after a few times.
    """
    paths = sorted(pathlib.Path(root).glob('*/*'))[:options.images]
    files = [path.read_bytes() for path in paths]
    rng, transform = numpy.random.default_rng(0), RandomResizedCrop(224)
    found = {PLAIN: PlainPillow(), **{
        name: create_decoder(name) for name in DECODERS}}
    samples = [(data, functools.partial(as_planned, transform.plan(
        *Image.open(io.BytesIO(data)).size, rng))) for data in files]
    seconds = {name: [] for name in found}
    for _ in range(options.epochs):
        for name, decoder in found.items():
            start = time.process_time()
            for sample in samples:
                decoder.decode(*sample)
            seconds[name].append(time.process_time() - start)
    rows = {}
    for name, decoder in found.items():
        milliseconds = 1e3 * statistics.median(seconds[name]) / len(files)
        gain = gain_of(seconds[name], seconds[PLAIN])
        mean, worst = errors(decoder.decode, found[PLAIN].decode,
                             samples[:300])
        rows[name] = {'milliseconds': milliseconds, 'gain': gain,
                      'mean error': mean, 'worst error': worst}
        print(f'{name:18}{milliseconds:9.3f} ms{gain:12.2f} x'
              f'{mean:12.3f}{worst:12.2f}', flush=True)
    return rows


def as_planned(plan, width, height):
    return plan


def gain_of(own, others):
    """How many times faster, as the median of runs side by side."""
    return statistics.median(other / mine for mine, other in zip(
        own, others, strict=True))


def errors(decode, reference, samples):
    """Mean absolute error to decode-then-crop: of all images, of the worst."""
    found = [numpy.abs(decode(*sample).astype('i2')
                       - reference(*sample)).mean() for sample in samples]
    return float(numpy.mean(found)), float(max(found))


def run(options, root):
    data = {}
    print('\nprocessor time of decoding, cropping and resizing; times as fast '
          'as Pillow\nalone, and the error to it, in levels of 255\n'
          f'{"":18}{"an image":>12}{"Pillow":>14}{"mean error":>12}'
          f'{"worst":>12}')
    data['decoders'] = decoders(options, root)
    print(f'\n{options.workers} workers, {options.prefetch} batches of '
          f'{options.batch} ahead\n'
          f'{"images/s":18}{"alone":>12}{"training":>12}{"waiting":>13}')
    data['ablation'] = ablation(options, root)
    print()
    data['workers'] = worker_counts(options, root)
    print()
    data['memory'] = memory(options, root)
    if options.json:
        write_json(options.json, data)


def main():
    options = parse()
    print(describe())
    if options.root:
        run(options, options.root)
        return
    with tempfile.TemporaryDirectory() as root:
        paths = build(root, options.images)
        size = sum(path.stat().st_size for path in paths)
        print(f'{len(paths)} photographs, {size / len(paths) / 1e3:.0f} kB '
              'in the mean')
        run(options, root)


if __name__ == '__main__':
    main()
