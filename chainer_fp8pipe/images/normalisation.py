"""Pixels as bytes to pixels as floats."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        ValueError: The numbers of channels differ, or a deviation is not
            above zero.
    """

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN,
                 std: Sequence[float] = IMAGENET_STD,
                 dtype: Any = numpy.float32) -> None:
        if len(mean) != len(std) or not len(mean):
            raise ValueError(
                f'mean has {len(mean)} channels but std {len(std)}: give '
                'one number of each per channel')
        if not all(s > 0 for s in std):
            raise ValueError(f'std must be above zero, not {tuple(std)}')
        self.mean, self.std = tuple(mean), tuple(std)
        self.dtype = numpy.dtype(dtype)
        self._scale = [1 / (255 * s) for s in std]
        self._shift = [-m / s for m, s in zip(mean, std, strict=True)]

    def __call__(self, batch: Any) -> Any:
        """Normalises images of shape (..., C, H, W), uint8, into new ones.

        ``batch`` is a NumPy or CuPy array, so that images may cross to the
        GPU as bytes and be normalised there.

        Raises:
            ValueError: The images have another number of channels.
        """
        result = batch.astype(self.dtype)
        for c, (scale, shift) in enumerate(self._of_channels(
                result.shape[-3])):
            channel = result[..., c, :, :]
            channel *= scale
            channel += shift
        return result

    def of_pixels(self, pixels: numpy.ndarray, out: numpy.ndarray) -> None:
        """Normalises (H, W, C) uint8 straight into (C, H, W) ``out``."""
        for c, (scale, shift) in enumerate(self._of_channels(
                pixels.shape[-1])):
            numpy.multiply(pixels[..., c], self.dtype.type(scale), out=out[c])
            out[c] += self.dtype.type(shift)

    def __repr__(self) -> str:
        return (f'Normalise(mean={self.mean}, std={self.std}, '
                f'dtype={self.dtype.name!r})')

    def check(self, channels: int) -> None:
        """Raises ValueError unless it can normalise so many channels."""
        if len(self.mean) not in (1, channels):
            raise ValueError(
                f'Normalise has mean and std of {len(self.mean)} channels, '
                f'but images have {channels}: give {channels} numbers of '
                'each, or one')

    def _of_channels(self, channels: int) -> list[tuple[float, float]]:
        """Scale and shift of each channel."""
        self.check(channels)
        return list(zip(self._scale, self._shift, strict=True)) * (
            channels // len(self.mean))


#: That of networks trained on ImageNet.
IMAGENET = Normalise()
