"""Sums of an array per channel, and scaling by a factor per channel."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy
from chainer import backend
from chainer.functions.normalization import batch_normalization

# Elements of a block: some 256 KiB in float32.
_BLOCK = 1 << 16
# Sums of more elements in float32 would lose digits.
_LONGEST = 4096


class ChannelView:
    """An input as an array of shape (outer, channels, inner).

    Statistics are over the first and the last axis.  On a CPU the array is
    read in blocks that stay in the cache from one operation to the next.

    Args:
        x: The input.
        gamma: An array of the shape of the channels.
        axis: Those that statistics are over; None: all but the second and
            those that follow it in gamma's shape.
    """

    def __init__(self, x: Any, gamma: Any, axis: tuple[int, ...] | None
                 ) -> None:
        self._xp = backend.get_array_module(x)
        self._gamma = gamma.shape, gamma.dtype
        # float16 sums would be too coarse.
        self._dtype = numpy.result_type(x.dtype, gamma.dtype, numpy.float32)
        keys = batch_normalization._compute_key_axis(x.ndim, gamma.ndim, axis)
        others = [item for item in range(x.ndim) if item not in keys]
        first = keys[0] if keys else 0
        before = ([item for item in others if item < first]
                  if keys == tuple(range(first, first + len(keys)))
                  else others)
        after = [item for item in others if item not in before]
        self._order = *before, *keys, *after
        self._lengths = [x.shape[item] for item in self._order]
        self._shape = outer, channels, inner = tuple(
            math.prod(x.shape[item] for item in items)
            for items in (before, keys, after))
        self.elements = outer * inner       # of each channel
        step = _BLOCK // max(channels * inner, 1)
        step = min(max(step, 1), _LONGEST) if self._xp is numpy else outer
        self._blocks = [slice(start, start + step)
                        for start in range(0, outer, max(step, 1))]
        step = _LONGEST if self._xp is numpy else max(inner, 1)
        self._stretches = [slice(start, start + step)
                           for start in range(0, inner, step)]

    def centre(self, x: Any) -> Any:
        """About the mean of each channel, which :meth:`moments` corrects.

        Zeros if there are no elements.
        """
        total = sum((self._sum(part) for part in self._parts(x)),
                    self._zeros())
        return (total / max(self.elements, 1)).astype(self._dtype)

    def moments(self, x: Any, shift: Any) -> Any:
        """Sums of each channel's x - shift and of its squares; float64."""
        sums = self._zeros(2)
        for part in self._parts(x):
            centred = part - shift[:, None]
            sums[0] += self._sum(centred)
            sums[1] += self._sum(centred, centred)
        return sums

    def products(self, gy: Any, x: Any, shift: Any) -> Any:
        """Sums of each channel's gy and of gy * (x - shift); float64."""
        sums = self._zeros(2)
        for above, part in zip(self._parts(gy), self._parts(x), strict=True):
            sums[0] += self._sum(above)
            sums[1] += self._sum(above, part - shift[:, None])
        return sums

    def scaled(self, x: Any, shift: Any, scale: numpy.ndarray,
               offset: numpy.ndarray, gy: Any = None, of_gy: Any = None
               ) -> Any:
        """``(x - shift) * scale + offset`` in the shape and dtype of x.

        And ``+ gy * of_gy``, where these are given.
        """
        factor, summand = self._column(scale), self._column(offset)
        result = self._xp.empty(self._shape, x.dtype)
        if gy is not None:
            above, weight = self._parts(gy), self._column(of_gy)
        for block, part in zip(self._blocks, self._parts(x), strict=True):
            value = part - shift[:, None]
            value *= factor
            value += summand
            if gy is not None:
                value += next(above) * weight
            result[block] = value
        order = sorted(range(x.ndim), key=self._order.__getitem__)
        return result.reshape(self._lengths).transpose(order)

    def channels(self, values: numpy.ndarray) -> Any:
        """One value per channel, as gamma's."""
        shape, dtype = self._gamma
        return self._xp.asarray(values.reshape(shape).astype(dtype))

    def _parts(self, x: Any) -> Iterator[Any]:
        x = x.transpose(self._order).reshape(self._shape)
        for block in self._blocks:
            yield x[block].astype(self._dtype, copy=False)

    def _zeros(self, *rows: int) -> Any:
        return self._xp.zeros((*rows, self._shape[1]))

    def _column(self, values: numpy.ndarray) -> Any:
        """One value per channel, to be broadcast."""
        return self._xp.asarray(values.astype(self._dtype))[:, None]

    def _sum(self, *factors: Any) -> Any:
        """Sums of the factors' product over each channel of a block."""
        if self._shape[2] == 1:
            axes = ','.join(['ok'] * len(factors))
            return self._xp.einsum(f'{axes}->k', *(x[:, :, 0]
                                                   for x in factors))
        axes = ','.join(['oki'] * len(factors))
        return sum(self._xp.einsum(
            f'{axes}->ok', *(x[:, :, part] for x in factors)).sum(
            axis=0, dtype=numpy.float64) for part in self._stretches)
