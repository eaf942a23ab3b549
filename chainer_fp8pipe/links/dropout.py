"""Dropout whose mask does not depend on how model and batch were cut."""
from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import chainer
import chainer.functions as F
import numpy
from chainer.functions.noise import dropout

from ..pipeline.randomness import Place, draw_number

_WORDS_PER_BLOCK = 4        # what Philox gives for one value of its counter


class Dropout(chainer.Link):
    """Sets elements to zero at random, as ``F.dropout`` does.

    In a pipeline the mask of a sample depends on the seed, the iteration, the
    layer's number and the sample's number in the batch of all replicas.  So it
    is the same for every number of stages, micro-batches and replicas.
    Elsewhere the mask is drawn from the global generator, as Chainer's is.

    The other elements are multiplied by ``1 / (1 - ratio)``.  When Chainer's
    ``train`` is False, nothing is changed.

    Args:
        ratio: Probability of zero, in [0, 1).

    Raises:
        ValueError: ``ratio`` is not in [0, 1).

    .. admonition:: Example

        >>> from chainer_fp8pipe.links import Divisible, Dropout
        >>> import chainer.links as L
        >>> model = Divisible(L.Linear(8, 8), Dropout(0.2), L.Linear(8, 2))
    """

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        if not 0 <= ratio < 1:
            raise ValueError(f'ratio must be in [0, 1), not {ratio}')
        self.ratio = float(ratio)

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
        yield 'ratio', self.ratio

    def forward(self, x: Any) -> chainer.Variable:
        """Drops elements of a floating-point ``x``, (samples, ...)."""
        if not chainer.config.train or self.ratio == 0:
            return chainer.as_variable(x)
        drawing = draw_number()
        if drawing is None:
            return F.dropout(x, self.ratio)
        if x.ndim == 0:
            raise ValueError('dropout takes an array of samples, not a '
                             'single number')
        return _Dropout(self.ratio, _Mask(*drawing)).apply((x,))[0]


class _Mask:
    """Where a mask is in the training; equal for all, as shapes are."""

    def __init__(self, place: Place, draw: int) -> None:
        self.place, self.draw = place, draw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask)

    def __hash__(self) -> int:
        return hash(_Mask)


class _Dropout(dropout.Dropout):
    """Chainer's function; its mask is made only where the function runs."""

    def __init__(self, ratio: float, mask: _Mask) -> None:
        super().__init__(ratio)
        self._mask = mask

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, = inputs
        mask = _mask(self._mask.place, self._mask.draw, x.shape,
                     self.dropout_ratio)
        scale = x.dtype.type(1 / (1 - self.dropout_ratio))
        self.mask = chainer.backend.get_device_from_array(x).send(
            mask.astype(x.dtype) * scale)
        return super().forward(inputs)


def _mask(place: Place, draw: int, shape: tuple[int, ...],
          ratio: float) -> numpy.ndarray:
    """True where elements are kept.

    The stream of Philox (Salmon et al., 2011) is a function of key and
    counter, so that a sample has its part of the stream wherever the
    micro-batch starts.  Elements take 32 bits each.
    """
    samples, elements = shape[0], int(numpy.prod(shape[1:], dtype=int))
    blocks = -(-elements // (2 * _WORDS_PER_BLOCK))
    seed, iteration, layer, first_sample = map(int, place)
    key = hashlib.blake2b(repr((seed, iteration, layer, draw)).encode(),
                          digest_size=16)
    generator = numpy.random.Philox(
        key=int.from_bytes(key.digest(), 'little'),
        counter=first_sample * blocks)
    words = generator.random_raw(samples * blocks * _WORDS_PER_BLOCK)
    numbers = words.astype('<u8', copy=False).view('<u4').reshape(
        samples, blocks * 2 * _WORDS_PER_BLOCK)[:, :elements]
    return (numbers >= round(ratio * 2 ** 32)).reshape(shape)
