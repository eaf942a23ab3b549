"""Transforms of images: crop, resize, mirror and normalise.

A transform is any object with four attributes.  ``plan(width, height, rng)``
gives a :class:`Crop` from the size alone, which is in the file's header, so
that a decoder decodes no more than the part and the size that are needed.
``finish(pixels, out=None)`` turns decoded pixels, (H, W, 3) uint8 RGB, into
a model's input; the result counts, in ``out`` or not.  ``shape`` (CHW) and
``dtype`` are those of every result.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

#: Of the pixels of ImageNet's training images, red, green, blue, in [0, 1].
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalise:
    """Pixels 0 to 255 to floats of about mean 0 and deviation 1.

    Args:
        mean: Per channel (red, green, blue), of pixels scaled to [0, 1];
            one number is for all channels.
        std: Standard deviation per channel, of the same.
        dtype: Of the result; :class:`numpy.float32` if not said.

    Raises:
        ValueError: The numbers of channels differ, a deviation is not above
            zero, or ``dtype`` is not of floats.
    """

    def __init__(self, mean: float | Sequence[float] = IMAGENET_MEAN,
                 std: float | Sequence[float] = IMAGENET_STD,
                 dtype: Any = numpy.float32) -> None:
        self.mean, self.std = (
            tuple(numpy.atleast_1d(value).tolist()) for value in (mean, std))
        self.dtype = numpy.dtype(dtype)
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f'mean has {len(self.mean)} channels but std '
                f'{len(self.std)}: give one number of each per channel')
        if not all(s > 0 for s in self.std):
            raise ValueError(f'std must be above zero, not {self.std}')
        if self.dtype.kind != 'f':
            raise ValueError(f'dtype must be of floats, not {self.dtype}')

    def __call__(self, batch: Any) -> Any:
        """Normalises images of shape (..., C, H, W), uint8, into new ones.

        ``batch`` is a NumPy or CuPy array, so that images may cross to the
        GPU as bytes and be normalised there.

        Raises:
            ValueError: The images have another number of channels.
        """
        result = batch.astype(self.dtype)
        for c, (scale, shift) in enumerate(self.channels(result.shape[-3])):
            result[..., c, :, :] *= scale
            result[..., c, :, :] += shift
        return result

    def channels(self, count: int) -> Iterator[tuple[float, float]]:
        """What pixels of each channel are multiplied with, and what is added.

        Raises:
            ValueError: It has another number of channels.
        """
        if len(self.mean) not in (1, count):
            raise ValueError(
                f'Normalise has mean and std of {len(self.mean)} channels, '
                f'but images have {count}: give {count} numbers of each, or '
                'one')
        for mean, std in list(zip(self.mean, self.std, strict=True)) * (
                count // len(self.mean)):
            yield 1 / (255 * std), -mean / std

    def __repr__(self) -> str:
        return (f'Normalise(mean={self.mean}, std={self.std}, '
                f'dtype={self.dtype.name!r})')


#: That of networks trained on ImageNet.
_IMAGENET = Normalise()


class Crop(NamedTuple):
    """A part of an image, its new size, and whether it is mirrored.

    Attributes:
        box: Left, top, width and height of the part that is used, in pixels
            of the image, inside it.
        size: Height and width, in pixels, to which that part is resized.
        flip: Whether the result is mirrored left to right.
    """

    box: tuple[int, int, int, int]
    size: tuple[int, int]
    flip: bool = False


class _Crop:
    """Size and normalisation of both crops."""

    def __init__(self, size: int | tuple[int, int],
                 normalise: Normalise | None) -> None:
        try:
            height, width = map(operator.index, (
                size if isinstance(size, Iterable) else (size, size)))
        except (TypeError, ValueError):     # no whole numbers, or not two
            height = width = 0
        if height < 1 or width < 1:
            raise ValueError(
                'size must be a whole number of pixels above zero, or height '
                f'and width, not {size!r}')
        self.size, self.normalise = (height, width), normalise
        if normalise is not None:
            list(normalise.channels(3))

    def __repr__(self) -> str:
        options = ', '.join(
            f'{name}={value}' for name, value in vars(self).items())
        return f'{type(self).__name__}({options})'

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, *self.size)

    @property
    def dtype(self) -> numpy.dtype:
        return (numpy.dtype(numpy.uint8) if self.normalise is None
                else self.normalise.dtype)

    def finish(self, pixels: numpy.ndarray,
               out: numpy.ndarray | None = None) -> numpy.ndarray:
        """Turns (H, W, 3) uint8 RGB into ``out``, (3, H, W) of ``dtype``."""
        if out is None:
            out = numpy.empty(self.shape, self.dtype)
        if self.normalise is None:
            out[...] = pixels.transpose(2, 0, 1)
        else:
            for c, (scale, shift) in enumerate(self.normalise.channels(3)):
                numpy.multiply(pixels[..., c], self.dtype.type(scale), out[c])
                out[c] += self.dtype.type(shift)
        return out


class RandomResizedCrop(_Crop):
    """A random part of random area and shape, resized: for training.

    The part's area is uniform in ``scale`` of the image's.  Its ratio of
    width to height is log-uniform in ``ratio``, its place uniform.  A part
    that does not fit is drawn again, ten times; then the largest central part
    of an allowed ratio is taken (Szegedy et al. 2015, "Going Deeper with
    Convolutions", section 6).

    Args:
        size: Height and width of the result, or one number for both.
        scale: Smallest and largest part of the image's area.
        ratio: Smallest and largest width over height of the part.
        flip: Probability of mirroring left to right.
        normalise: Turns pixels into floats; ``None`` leaves them bytes, a
            quarter of the memory, to be normalised later.

    Raises:
        ValueError: A range is empty or outside what is possible, or
            ``normalise`` is for other than 1 or 3 channels.
    """
    def __init__(self, size: int | tuple[int, int],
                 scale: tuple[float, float] = (0.08, 1.0),
                 ratio: tuple[float, float] = (3 / 4, 4 / 3),
                 flip: float = 0.5,
                 normalise: Normalise | None = _IMAGENET) -> None:
        super().__init__(size, normalise)
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError('scale must be two parts of the area in (0, 1], '
                             f'the smaller first, not {scale}')
        if not 0 < ratio[0] <= ratio[1] < math.inf:
            raise ValueError('ratio must be two ratios above zero, the '
                             f'smaller first, not {ratio}')
        if not 0 <= flip <= 1:
            raise ValueError(f'flip is a probability, not {flip}')
        self.scale, self.ratio, self.flip = scale, ratio, flip

    def plan(self, width: int, height: int,
             rng: numpy.random.Generator) -> Crop:
        """Draws a part of an image of ``width`` x ``height`` pixels."""
        return Crop(self._box(width, height, rng), self.size,
                    bool(rng.random() < self.flip))

    def _box(self, width: int, height: int,
             rng: numpy.random.Generator) -> tuple[int, int, int, int]:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return (int(rng.integers(width - w + 1)),
                        int(rng.integers(height - h + 1)), w, h)
        w, h = width, height
        if width < height * self.ratio[0]:
            h = min(height, max(1, round(width / self.ratio[0])))
        elif width > height * self.ratio[1]:
            w = min(width, max(1, round(height * self.ratio[1])))
        return _central(width, height, w, h)


class CenterCrop(_Crop):
    """The central part, resized: for evaluation.

    Equals resizing the image until its shorter side has ``resize`` pixels and
    cutting ``size`` out of its centre.  The part's edges are rounded to whole
    pixels of the image.

    Args:
        size: Height and width of the result, or one number for both.
        resize: Pixels of the shorter side; None: 8/7 of the larger side of
            the result (256 for 224).
        normalise: As in :class:`RandomResizedCrop`.

    Raises:
        ValueError: ``resize`` is smaller than ``size``, or ``normalise`` is
            for other than 1 or 3 channels.
    """

    def __init__(self, size: int | tuple[int, int],
                 resize: int | None = None,
                 normalise: Normalise | None = _IMAGENET) -> None:
        super().__init__(size, normalise)
        self.resize = round(max(self.size) * 8 / 7) if resize is None \
            else resize
        if self.resize < max(self.size):
            raise ValueError(
                f'an image whose shorter side has resize={self.resize} '
                f'pixels has no centre of {self.size[0]} x {self.size[1]}: '
                f'give resize={max(self.size)} or more')

    def plan(self, width: int, height: int,
             rng: numpy.random.Generator | None = None) -> Crop:
        """The centre of an image of ``width`` x ``height``; no chance."""
        scale = min(width, height) / self.resize
        h, w = (min(side, max(1, round(part * scale)))
                for side, part in zip((height, width), self.size,
                                      strict=True))
        return Crop(_central(width, height, w, h), self.size)


def _central(width: int, height: int, w: int,
             h: int) -> tuple[int, int, int, int]:
    return ((width - w) // 2, (height - h) // 2, w, h)
