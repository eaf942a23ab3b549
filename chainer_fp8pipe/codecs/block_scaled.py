"""Gradients in 4 or 5 bits, each 32 with a scale of their own.

The formats are those of :mod:`chainer_fp8pipe.formats`; unlike fp8's
(:mod:`.fp8_ratio`), the scale follows from the gradients alone: a ratio to the
parameter would let the smallest of 32 parameters set the scale of all.

Of an element that is ten times as large as the 31 beside it, an outlier, no
more is added to the next encoding than these have, or it would keep them out
of their records at the next updates, too.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy

from ..formats import FORMATS, RECORD, RecordFormat
from .codec import GRADIENT, Codec, Part, State
from .coding import RECORDS, Coding, Tensors, named_parts, tensors_of


def _unit(loss_scale: float) -> float:
    """A power of two near it, by which gradients are divided.

    Scales of records reach from 2^-49 to 2^14, wherever a loss scale puts
    gradients.
    """
    return 2.0 ** round(math.log2(loss_scale))


def _over_unit(loss_scale: float) -> float:
    """What numbers on the wire are multiplied by."""
    return loss_scale / _unit(loss_scale)


@dataclasses.dataclass(frozen=True)
class BlockScaled(Codec):
    """Records of 32 elements on the wire.

    Values are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.Options`.

    Attributes:
        name: Of the format, see :data:`~chainer_fp8pipe.formats.FORMATS`.
        error_feedback: Whether residuals are carried to the next update.
    """

    name: str = 'int4'
    error_feedback: bool = True

    grain: ClassVar[int] = RECORD

    @property
    def format(self) -> RecordFormat:
        """The records' format."""
        return FORMATS[self.name]

    @property
    def wire_dtype(self) -> numpy.dtype:
        """One record."""
        return self.format.dtype

    def _rescale_state(self, state: State, loss_scale: float) -> None:
        state.multiply_residuals(
            _over_unit(loss_scale) / _over_unit(state.loss_scale))

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> Coding:
        unit = _unit(state.loss_scale)
        return Coding(self, state, tensors, RECORDS,
                      format=self.format.number, scales=numpy.tile(
                          [prescale / unit, 0.0, unit, 0.0, 0.0],
                          (len(tensors.names), 1)))

    def parts(self, state: State, tensors: Tensors, start: int, stop: int
              ) -> tuple[Part, ...]:
        unit = 1 / _over_unit(state.loss_scale)
        return tuple(
            Part(name, part.stop - part.start, unit)
            for _, part, name in named_parts(tensors, start, stop))

    def relay(self, state: State, parts: tuple[Part, ...], rank: int
              ) -> Coding:
        return Coding(self, state, tensors_of(parts, RECORD), RECORDS,
                      format=self.format.number,
                      units={part.name: part.unit for part in parts})

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return not (self.format.rows(wire)[:, -1] == 255).any()

    def encode_on_device(self, coding: Coding, tensor: int, out: Any
                         ) -> tuple[int, int]:
        tensors = coding.tensors
        gradient = tensors.gradients[tensor]
        return 0, self.format.encode(
            gradient, out, factor=float(coding.scales[tensor, 0]),
            residual=coding.state.residual(
                tensors.xp, GRADIENT, tensors.names[tensor], 0, gradient.size)
            if self.error_feedback else None)

    def decode_on_device(self, coding: Coding, tensor: int, wire: Any) -> int:
        return self.format.decode(wire, coding.tensors.gradients[tensor],
                                  factor=float(coding.scales[tensor, 2]))
