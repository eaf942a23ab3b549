"""Transforms of images: crop, resize, mirror and normalise.

A transform is any object with four attributes.  ``plan(width, height, rng)``
gives a :class:`Crop` from the size alone, which is in the file's header, so
that a decoder decodes no more than the part and the size that are needed.
``finish(pixels, out=None)`` turns decoded pixels, (H, W, 3) uint8 RGB, into
a model's input; the result counts, in ``out`` or not.  ``shape`` (CHW) and
``dtype`` are those of every result.
"""
from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import chainer
import numpy

#: Of the pixels of ImageNet's training images, red, green, blue, in [0, 1].
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(eq=False)
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

    mean: float | Sequence[float] = IMAGENET_MEAN
    std: float | Sequence[float] = IMAGENET_STD
    dtype: Any = 'float32'

    def __post_init__(self) -> None:
        mean, std = (numpy.reshape(value, (-1, 1, 1))
                     for value in (self.mean, self.std))
        if not (std > 0).all():
            raise ValueError(f'std must be above zero, not {self.std}')
        self.dtype = numpy.dtype(self.dtype)
        if self.dtype.kind != 'f':
            raise ValueError(f'dtype must be of floats, not {self.dtype}')
        self._scale = (1 / (255 * std)).astype(self.dtype)
        self._shift = (-mean / std).astype(self.dtype)

    def __call__(self, batch: Any, out: Any = None) -> Any:
        """Normalises images of shape (..., C, H, W), uint8, into new ones.

        ``batch`` is a NumPy or CuPy array, so that images may cross to the
        GPU as bytes and be normalised there.

        Raises:
            ValueError: The images have another number of channels.
        """
        xp = chainer.backend.get_array_module(batch)
        channels = max(len(self._scale), len(self._shift))
        if batch.ndim < 3 or 1 < channels != batch.shape[-3]:
            raise ValueError(f'images are of shape {batch.shape}; expected '
                             f'(..., {channels}, height, width)')
        result = xp.multiply(batch, xp.asarray(self._scale), out=out,
                             dtype=self.dtype)
        result += xp.asarray(self._shift)
        return result


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

    size: Any
    normalise: Normalise | None

    def __post_init__(self) -> None:
        height, width = map(operator.index, numpy.broadcast_to(self.size, 2))
        if min(height, width) < 1:
            raise ValueError(
                f'size must be above zero, in pixels, not {self.size}')
        self.size = height, width

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, *self.size)

    @property
    def dtype(self) -> numpy.dtype:
        return (numpy.dtype(numpy.uint8) if self.normalise is None
                else self.normalise.dtype)

    def finish(self, pixels: numpy.ndarray,
               out: numpy.ndarray | None = None) -> numpy.ndarray:
        """Turns (H, W, 3) uint8 RGB into (3, H, W) of ``dtype``."""
        image = pixels.transpose(2, 0, 1)
        return image if self.normalise is None else self.normalise(image, out)


@dataclasses.dataclass
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
        ValueError: A range is empty or outside what is possible.
    """

    size: Any
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    normalise: Normalise | None = Normalise()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (low, high), most in (('scale', self.scale, 1),
                                        ('ratio', self.ratio, math.inf)):
            if not 0 < low <= high <= most or high == math.inf:
                raise ValueError(
                    f'{name} must be two numbers above 0 and up to {most}, '
                    f'the smaller first, not ({low}, {high})')
        if not 0 <= self.flip <= 1:
            raise ValueError(f'flip is a probability, not {self.flip}')

    def plan(self, width: int, height: int,
             rng: numpy.random.Generator) -> Crop:
        """Draws a part of an image of ``width`` x ``height`` pixels."""
        low, high = self.ratio
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = (int(rng.integers(room + 1))
                             for room in (width - w, height - h))
                break
        else:
            w = min(width, max(1, round(height * high)))
            h = min(height, max(1, round(width / low)))
            left, top = (width - w) // 2, (height - h) // 2
        return Crop((left, top, w, h), self.size,
                    bool(rng.random() < self.flip))


@dataclasses.dataclass
class CenterCrop(_Crop):
    """The central part, resized: for evaluation.

    Equals resizing the image until its shorter side has 8/7 of the pixels of
    the larger side of the result (256 for 224), and cutting the result out of
    its centre.  The part's edges are rounded to whole pixels of the image.

    Args:
        size: Height and width of the result, or one number for both.
        normalise: As in :class:`RandomResizedCrop`.
    """

    size: Any
    normalise: Normalise | None = dataclasses.field(
        default=Normalise(), kw_only=True)

    def plan(self, width: int, height: int,
             rng: numpy.random.Generator | None = None) -> Crop:
        """The centre of an image of ``width`` x ``height``; no chance."""
        scale = min(width, height) / round(max(self.size) * 8 / 7)
        h, w = (min(side, max(1, round(part * scale)))
                for side, part in zip((height, width), self.size,
                                      strict=True))
        return Crop(((width - w) // 2, (height - h) // 2, w, h), self.size)
