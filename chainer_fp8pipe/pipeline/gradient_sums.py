"""Sums of parameters' gradients over micro-batches."""
from __future__ import annotations

from typing import Any

import chainer
import numpy


class GradientSums:
    """Adds up gradients in buffers that are kept from step to step.

    Chainer's own accumulation makes a new array for every sum.  Micro-batches
    come in their order on every rank, so the sum has the same bits whatever
    the cut.  float16 is summed in float32.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}
        self._parameters: dict[int, chainer.Parameter] = {}

    def add(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """Adds a micro-batch's gradient; the array is only read."""
        key = id(parameter)
        buffer = self._buffer(key, gradient)
        if key in self._parameters:
            buffer += gradient
        else:
            self._parameters[key] = parameter
            buffer[...] = gradient

    def collect(self, parameters: list[chainer.Parameter]) -> None:
        """Adds what Chainer's backward left in these, and clears it there."""
        for parameter in parameters:
            if parameter.array is not None and parameter.grad is not None:
                self.add(parameter, parameter.grad)
                parameter.cleargrad()

    def finish(self, loss_scale: float | None) -> None:
        """Hands the sums over to ``parameter.grad`` and starts anew."""
        for key, parameter in self._parameters.items():
            parameter.grad = self._buffers[key].astype(
                parameter.dtype, copy=False)
            parameter._loss_scale = loss_scale
        self._parameters.clear()

    def forget(self) -> None:
        """Starts anew, after a step that failed."""
        self._parameters.clear()

    def _buffer(self, key: int, gradient: Any) -> Any:
        dtype = numpy.promote_types(gradient.dtype, numpy.float32)
        buffer = self._buffers.get(key)
        if (buffer is None or buffer.shape != gradient.shape
                or buffer.dtype != dtype):
            xp = chainer.backend.get_array_module(gradient)
            buffer = self._buffers[key] = xp.empty(gradient.shape, dtype)
        return buffer
