"""Gradients in 4 or 5 bits, each 32 with a scale of their own.

The format is that of :mod:`~chainer_fp8pipe.block_formats`; unlike fp8's
(:mod:`.fp8_ratio`), the scale follows from the gradients alone: a ratio to the
parameter would let the smallest of 32 parameters set the scale of all.

What an encoding leaves out is added to the next one, where gradients are sent
and where means are (error feedback on both sides: Tang et al.,
"DoubleSqueeze", ICML 2019, Algorithm 1).  Of an element that is ten times as
large as the 31 beside it, an outlier, no more is added than these have, or it
would keep them out of their records at the next updates, too.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from ..block_formats import FORMATS
from .codec import Codec, Residuals
from .staging import download, output, upload, upload_now
from .tensors import (
    RECORDS,
    Compiled,
    Tensors,
    array_module,
    compile_sizes,
    compile_tensors,
)


class BlockScaled(Codec):
    """Records of 32 elements on the wire.

    Arguments are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.BlockOptions`.

    Args:
        values: Name of the format, see
            :data:`~chainer_fp8pipe.block_formats.FORMATS`.
        error_feedback: Whether residuals are carried to the next update.

    Attributes:
        over_unit: The loss scale over a power of two near it: what numbers
            on the wire are multiplied by.
    """

    def __init__(self, values: str = 'int4', *, error_feedback: bool = True
                 ) -> None:
        super().__init__()
        self.name = values
        self.format = FORMATS[values]
        self.wire_dtype = self.format.dtype
        self.error_feedback = error_feedback
        self._unit = 1.0        # a power of two near the loss scale
        self.over_unit = 1.0
        self._residuals = Residuals()

    grain = 32

    # --- an update ---------------------------------------------------------

    def start(self, loss_scale: float) -> None:
        super().start(loss_scale)
        # Scales reach from 2^-49 to 2^14, wherever a loss scale puts
        # gradients.
        self._unit = 2.0 ** round(math.log2(loss_scale))
        over_unit = loss_scale / self._unit
        if over_unit != self.over_unit:
            self._residuals.multiply(over_unit / self.over_unit)
            self.over_unit = over_unit

    def encode(self, tensors: Tensors, wire: numpy.ndarray,
               prescale: float = 1.0, start: int = 0) -> None:
        there = self._records(tensors.xp, wire)
        out = output(tensors.xp, there)
        whole = 0, tensors.size
        for index, part, place in tensors.overlaps(start, start + wire.size):
            if self.format.encode(
                    tensors.gradients[index][part], out[place],
                    factor=prescale / self._unit, residual=self.owned_residual(
                        tensors, index, part, 'gradient', whole)):
                self.blame(f'the gradient of {tensors.names[index]}')
        download(out, there)

    def accumulate(self, wire: numpy.ndarray, total: Any) -> None:
        xp = array_module(total)
        self.format.accumulate(upload(xp, self._records(xp, wire)), total)

    def encode_mean(self, tensors: Tensors, total: Any, count: int,
                    wire: numpy.ndarray, start: int, site: str,
                    owned: tuple[int, int]) -> None:
        there = self._records(tensors.xp, wire)
        out = output(tensors.xp, there)
        for index, part, place in tensors.overlaps(start, start + wire.size):
            first = place.start * self.grain
            self.format.encode(
                total[first:first + part.stop - part.start], out[place],
                factor=1 / count, residual=self.owned_residual(
                    tensors, index, part, site, owned))
        download(out, there)

    def decode(self, tensors: Tensors, wire: numpy.ndarray, start: int = 0
               ) -> list[str]:
        records = upload_now(tensors.xp, self._records(tensors.xp, wire))
        return [
            tensors.names[index]
            for index, part, place in tensors.overlaps(start,
                                                       start + wire.size)
            if self.format.decode(
                records[place], tensors.gradients[index][part],
                factor=self._unit)]

    def _records(self, xp: Any, wire: numpy.ndarray) -> numpy.ndarray:
        """A wire as the format has it where ``xp`` computes."""
        return wire if xp is numpy else self.format.rows(wire)

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return self.format.is_finite(wire)

    # --- compiled code -------------------------------------------------------

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        if tensors.xp is not numpy:
            return None
        return compile_tensors(
            RECORDS, tensors, self.residuals_of_gradients(tensors),
            format=self.format.number,
            scales=self._scales(tensors, prescale))

    def compiled_sums(self, tensors: Tensors,
                      owned: Sequence[tuple[int, int]]) -> Compiled | None:
        return compile_sizes(RECORDS, tensors, format=self.format.number)

    def _scales(self, tensors: Tensors, prescale: float) -> numpy.ndarray:
        return numpy.tile(numpy.array(
            [prescale / self._unit, 0, self._unit, 0, 0], numpy.float32),
            (len(tensors.names), 1))

    def residual_norms(self) -> dict[str, float]:
        return self._residuals.norms()

    def residual(self, xp: Any, site: str, name: str, start: int,
                 stop: int) -> Any:
        if not self.error_feedback:
            return None
        return self._residuals.get(xp, site, name, start, stop)

    # --- state ---------------------------------------------------------------

    def state(self) -> dict[str, numpy.ndarray]:
        return {'over_unit': numpy.asarray(self.over_unit),
                **{f'residual|{key}': array for key, array
                   in self._residuals.state().items()}}

    def load_state(self, state: dict[str, numpy.ndarray]) -> None:
        unknown = [key for key in state if key != 'over_unit'
                   and not key.startswith('residual|')]
        if unknown or 'over_unit' not in state:
            raise ValueError(f'this is no state of the {self.name} codec: '
                             f'{sorted(unknown or state)}')
        self.over_unit = float(state['over_unit'])
        self._residuals = Residuals({
            key.partition('|')[2]: array for key, array in state.items()
            if key != 'over_unit'})
