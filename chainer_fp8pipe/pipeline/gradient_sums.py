"""Sums of parameters' gradients over micro-batches."""
from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import chainer.links as L
import numpy

#: Samples with which a matrix product runs at full speed, and takes much
#: longer than the addition of its result.
ENOUGH = 256

#: Called with a parameter and its gradient, which is final.
Final = Callable[[chainer.Parameter, Any], None]


class GradientSums:
    """Adds up gradients in buffers that are kept from step to step.

    Chainer's own accumulation makes a new array for every sum.  A buffer that
    somebody still holds, such as a hook that compares two updates' gradients,
    stays as it is, and the next step has another one.  Micro-batches
    come in their order on every rank, so the sum has the same bits whatever
    the cut.  float16 is summed in float32.

    The gradients of a fully connected layer for several small micro-batches
    are one product of matrices.  Which micro-batches go together depends on
    their sizes and on :meth:`settle` only.
    """

    def __init__(self) -> None:
        self._products: dict[int, tuple[L.Linear, list[Any]]] = {}
        self._buffers: dict[int, Any] = {}
        self._parameters: dict[int, chainer.Parameter] = {}
        self._to_come: collections.Counter[int] = collections.Counter()
        self._final: Final | None = None
        #: Whether the step's last micro-batch is on its way back.
        self.last = False
        self._results: dict[int, Any] = {}

    def begin(self, blocks: Iterable[Any], final: Final | None) -> None:
        """Starts a step.

        Args:
            blocks: All blocks of this rank, or links; one that is run twice
                comes twice.  :meth:`through` must be called for each.
            final: Called for each parameter, if not None, with the array that
                will be its gradient, when nothing more will be added.
        """
        self._final = final
        self._to_come = collections.Counter(
            key for block in blocks for key in _parameters(block))

    def through(self, block: Any) -> None:
        """Notes that the last micro-batch is through a block."""
        done = []
        for key, parameter in _parameters(block).items():
            if not self._to_come[key]:      # taken already
                continue
            self._to_come[key] -= 1
            if self._to_come[key] == 0:
                done.append(parameter)
        if not done:
            return
        self.collect(done)
        keys = set(map(id, done))
        self._settle([other for other, _ in tuple(self._products.values())
                      if keys.intersection(_parameters(other))])
        for parameter in done:
            if self._final and id(parameter) in self._parameters:
                self._final(parameter, self._result(parameter))

    def take(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """As :meth:`add`, for the whole gradient of one block.

        In the last micro-batch the sum is final if no other block adds to it.
        """
        self.add(parameter, gradient)
        if self.last and self._final and (
                self._to_come.get(id(parameter)) == 1):
            self._to_come[id(parameter)] = 0
            self._final(parameter, self._result(parameter))

    def add(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """Adds a micro-batch's gradient; the array is only read."""
        buffer, started = self._buffer(parameter, gradient)
        if started:
            buffer += gradient
        else:
            buffer[...] = gradient

    def add_product(self, layer: L.Linear, gradient: numpy.ndarray,
                    inputs: numpy.ndarray) -> None:
        """Adds the gradients of a fully connected layer's parameters.

        Both arrays are kept, and must not be changed, until there are
        :data:`ENOUGH` samples, or :meth:`settle` or :meth:`finish` is called.

        Args:
            layer: With parameters of float32.
            gradient: Of its output, float32[samples, outputs].
            inputs: float32[samples, inputs].
        """
        _, parts = self._products.setdefault(id(layer), (layer, []))
        parts.append((gradient, inputs))
        if sum(len(part) for part, _ in parts) >= ENOUGH:
            self._settle([layer])

    def settle(self, blocks: Iterable[Any]) -> None:
        """Adds the products that are kept of these blocks' links."""
        self._settle(link for block in blocks for link in block.links())

    def _settle(self, layers: Iterable[Any]) -> None:
        for layer in layers:
            _, parts = self._products.pop(id(layer), (None, []))
            if parts:
                self._multiply(layer, *map(_joined, zip(*parts, strict=True)))

    def collect(self, parameters: list[chainer.Parameter]) -> None:
        """Moves the gradients that Chainer's backward left into the sums."""
        for parameter in parameters:
            if parameter.array is not None and parameter.grad is not None:
                self.add(parameter, parameter.grad)
                parameter.cleargrad()

    def finish(self, loss_scale: float | None) -> None:
        """Hands the sums over to ``parameter.grad`` and starts anew."""
        self._settle([layer for layer, _ in self._products.values()])
        for parameter in self._parameters.values():
            parameter.grad = self._result(parameter)
            parameter._loss_scale = loss_scale
        self._clear()

    def forget(self) -> None:
        """Starts anew, after a step that failed."""
        self._products.clear()
        self._clear()

    def _clear(self) -> None:
        self._parameters.clear()
        self._results.clear()
        self._final = None

    def _result(self, parameter: chainer.Parameter) -> Any:
        """The array that will be the parameter's gradient."""
        key = id(parameter)
        if key not in self._results:
            self._results[key] = self._buffers[key].astype(
                parameter.dtype, copy=False)
        return self._results[key]

    def _multiply(self, layer: L.Linear, gradient: numpy.ndarray,
                  inputs: numpy.ndarray) -> None:
        buffer, started = self._buffer(layer.W, layer.W.array)
        if started:
            buffer += gradient.T.dot(inputs)
        else:
            numpy.dot(gradient.T, inputs, out=buffer)
        if layer.b is not None:
            self.add(layer.b, gradient.sum(axis=0))

    def _buffer(self, parameter: chainer.Parameter, like: Any
                ) -> tuple[Any, bool]:
        """A parameter's buffer, and whether it holds a sum already."""
        key = id(parameter)
        dtype = numpy.promote_types(like.dtype, numpy.float32)
        started = key in self._parameters
        if not started and _references(self._buffers, key) > _ONLY_HERE:
            del self._buffers[key]
        buffer = self._buffers.get(key)
        if (buffer is None or buffer.shape != like.shape
                or buffer.dtype != dtype):
            xp = chainer.backend.get_array_module(like)
            buffer = self._buffers[key] = xp.empty(like.shape, dtype)
        self._parameters[key] = parameter
        return buffer, started


def _references(buffers: dict[int, Any], key: int) -> int:
    """How many references there are to a buffer; views have one, too."""
    return sys.getrefcount(buffers[key]) if key in buffers else 0


#: What an array has that nobody else holds; interpreters count differently.
_ONLY_HERE = _references({0: numpy.empty(0)}, 0)


def _parameters(block: Any) -> dict[int, chainer.Parameter]:
    return {id(parameter): parameter for parameter in block.params()}


def _joined(parts: tuple[numpy.ndarray, ...]) -> numpy.ndarray:
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)
