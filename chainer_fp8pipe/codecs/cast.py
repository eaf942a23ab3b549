"""float32 and float16 on the wire."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from .codec import Codec
from .staging import download, output, upload, upload_now
from .tensors import (
    FLOAT16,
    FLOAT32,
    Compiled,
    Tensors,
    array_module,
    compile_sizes,
    compile_tensors,
)


class Cast(Codec):
    """Sends every gradient as a number of ``dtype``.

    ``float16`` overflows to infinity above 65504, which is reported like an
    infinite gradient; scale the loss, or use fp8, which adapts its range.

    Args:
        dtype: ``'float32'`` or ``'float16'``.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        if dtype not in ('float32', 'float16'):
            raise ValueError(f"dtype must be 'float32' or 'float16', "
                             f'not {dtype!r}')
        self.name = dtype
        self.wire_dtype = numpy.dtype(dtype)
        self._number = FLOAT32 if dtype == 'float32' else FLOAT16

    def encode(self, tensors: Tensors, wire: numpy.ndarray,
               prescale: float = 1.0, start: int = 0) -> None:
        out = output(tensors.xp, wire)
        with numpy.errstate(over='ignore'):
            for index, part, place in tensors.overlaps(start,
                                                       start + wire.size):
                gradient = tensors.gradients[index][part]
                if prescale != 1.0:
                    gradient = gradient * numpy.float32(prescale)
                out[place] = gradient
                if not _all_finite(out[place]):
                    self.blame(f'the gradient of {tensors.names[index]}')
        download(out, wire)

    def accumulate(self, wire: numpy.ndarray, total: Any) -> None:
        with numpy.errstate(invalid='ignore', over='ignore'):
            total += upload(array_module(total), wire)

    def encode_mean(self, tensors: Tensors, total: Any, count: int,
                    wire: numpy.ndarray, start: int, site: str,
                    owned: tuple[int, int]) -> None:
        total /= numpy.float32(count)
        out = output(tensors.xp, wire)
        with numpy.errstate(over='ignore'):
            out[...] = total
        download(out, wire)

    def decode(self, tensors: Tensors, wire: numpy.ndarray, start: int = 0
               ) -> list[str]:
        values = upload_now(tensors.xp, wire)
        nonfinite = []
        for index, part, place in tensors.overlaps(start, start + wire.size):
            tensors.gradients[index][part] = values[place]
            if not _all_finite(values[place]):
                nonfinite.append(tensors.names[index])
        return nonfinite

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        return compile_tensors(self._number, tensors)

    def compiled_sums(self, tensors: Tensors,
                      owned: Sequence[tuple[int, int]]) -> Compiled | None:
        return compile_sizes(self._number, tensors)

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return _all_finite(wire)

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        with numpy.errstate(invalid='ignore', over='ignore'):
            total += wire

    def rescale(self, wire: numpy.ndarray, factor: float) -> None:
        wire *= wire.dtype.type(factor)


def _all_finite(values: Any) -> bool:
    # A sum is one fast pass and is never finite when an element is not;
    # only where it overflows by itself are the elements looked at.
    with numpy.errstate(invalid='ignore', over='ignore'):
        total = float(values.sum(dtype=numpy.float32))
    return numpy.isfinite(total) or bool(
        array_module(values).isfinite(values).all())
