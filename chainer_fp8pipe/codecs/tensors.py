"""The gradients and parameters of one update, laid end to end."""
from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy


class TensorRange(NamedTuple):
    """The part of one tensor that lies inside a range of the fused vector."""

    tensor: int         # which one
    in_tensor: slice    # the part, counted from the tensor's first element
    in_range: slice     # the same part, counted from the range's start


class Tensors:
    """Parameter tensors and their gradients, fused into one vector.

    Nothing is copied: the fused vector is only a way of numbering elements
    (tensor fusion), so that small tensors need no message of their own.

    Args:
        names: One name per tensor, unique, in the same order on all ranks.
        gradients: Flat float32 arrays, all NumPy or all CuPy.
        parameters: Flat float32 arrays of the same sizes.
        loss_scale: Factor that the gradients carry (mixed precision).

    Attributes:
        size: Number of elements of the fused vector.
        offsets: Index of each tensor's first element, and ``size``.
        xp: ``numpy`` or ``cupy``.
    """

    def __init__(self, names: Sequence[str], gradients: Sequence[Any],
                 parameters: Sequence[Any], loss_scale: float = 1.0) -> None:
        self.names = tuple(names)
        self.gradients = list(gradients)
        self.parameters = list(parameters)
        self.loss_scale = loss_scale
        self.offsets = [0]
        for gradient in self.gradients:
            self.offsets.append(self.offsets[-1] + gradient.size)
        self.size = self.offsets[-1]
        self.xp = array_module(*self.gradients)

    def overlaps(self, start: int, stop: int) -> Iterator[TensorRange]:
        """The non-empty parts of tensors inside ``[start, stop)``."""
        first = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        for index in range(first, len(self.names)):
            low = max(self.offsets[index], start)
            high = min(self.offsets[index + 1], stop)
            if self.offsets[index] >= stop:
                break
            if low < high:
                offset = self.offsets[index]
                yield TensorRange(index, slice(low - offset, high - offset),
                              slice(low - start, high - start))


def array_module(*arrays: Any) -> Any:
    """``numpy`` if all arrays are NumPy's (or there are none), else CuPy."""
    if all(isinstance(array, numpy.ndarray) for array in arrays):
        return numpy
    import cupy
    return cupy
