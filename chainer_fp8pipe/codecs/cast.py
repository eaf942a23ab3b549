"""float32 and float16 on the wire."""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy

from .codec import Codec, Part, State
from .coding import FLOAT16, FLOAT32, Coding, Tensors, tensors_of
from .staging import array_module


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Sends every gradient as a number of a dtype.

    ``float16`` overflows to infinity above 65504, which is reported like an
    infinite gradient; scale the loss, or use fp8, which adapts its range.

    Attributes:
        name: ``'float32'`` or ``'float16'``.
    """

    name: str

    error_feedback = False

    def __post_init__(self) -> None:
        if self.name not in ('float32', 'float16'):
            raise ValueError(f"dtype must be 'float32' or 'float16', "
                             f'not {self.name!r}')

    @property
    def wire_dtype(self) -> numpy.dtype:
        """That of the name."""
        return numpy.dtype(self.name)

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> Coding:
        return Coding(self, state, tensors, self._number, prescale=prescale)

    def relay(self, state: State, parts: tuple[Part, ...], rank: int
              ) -> Coding:
        return Coding(self, state, tensors_of(parts, 1), self._number,
                      units={})

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return not _count_nonfinite(wire)

    def encode_on_device(self, coding: Coding, tensor: int, out: Any
                         ) -> tuple[int, int]:
        gradient = coding.tensors.gradients[tensor]
        with numpy.errstate(over='ignore'):
            if coding.prescale != 1.0:
                gradient = gradient * numpy.float32(coding.prescale)
            out[...] = gradient
        return 0, _count_nonfinite(out)

    def decode_on_device(self, coding: Coding, tensor: int, wire: Any) -> int:
        coding.tensors.gradients[tensor][...] = wire
        return _count_nonfinite(wire)

    @property
    def _number(self) -> int:
        return FLOAT32 if self.name == 'float32' else FLOAT16


def _count_nonfinite(values: Any) -> int:
    """How many are not finite, or 0 without a look at each.

    A sum is one fast pass and is never finite when an element is not; only
    where it overflows by itself are the elements looked at.
    """
    with numpy.errstate(invalid='ignore', over='ignore'):
        total = float(values.sum(dtype=numpy.float32))
    return 0 if numpy.isfinite(total) else values.size - int(
        array_module(values).isfinite(values).sum())
