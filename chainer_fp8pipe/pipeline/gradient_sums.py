"""Sums of parameters' gradients over micro-batches."""
from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import chainer
import numpy

#: Samples with which a matrix product runs at full speed, and takes much
#: longer than the addition of its result.
ENOUGH = 256

#: Called with a parameter and its gradient, which is final.
Final = Callable[[chainer.Parameter, Any], None]


class _Product(NamedTuple):
    """Factors of the gradients of a weight and a bias, put off."""

    weight: chainer.Parameter
    bias: chainer.Parameter | None
    parts: list[tuple[numpy.ndarray, numpy.ndarray]]


class GradientSums:
    """Adds up gradients in buffers that are kept from step to step.

    Chainer's own accumulation makes a new array for every sum.  A buffer that
    somebody still holds, such as a hook that compares two updates' gradients,
    stays as it is, and the next step has another one.  Micro-batches
    come in their order on every rank, so the sum has the same bits whatever
    the cut.  float16 is summed in float32.

    The gradients of a weight for several small micro-batches are one product
    of matrices.  Which micro-batches go together depends on their sizes and
    on :meth:`settle` only.

    Attributes:
        last: Whether the step's last micro-batch is on its way back.
    """

    def __init__(self) -> None:
        self.last = False
        self._products: dict[int, _Product] = {}
        self._buffers: dict[int, Any] = {}
        self._parameters: dict[int, chainer.Parameter] = {}
        self._to_come: collections.Counter[int] = collections.Counter()
        self._final: Final | None = None
        self._results: dict[int, Any] = {}

    def begin(self, parts: Iterable[list[chainer.Parameter]],
              final: Final | None) -> None:
        """Starts a step.

        Args:
            parts: The parameters of each part of the model on this rank.
                :meth:`through` must be called for each.
            final: Called for each parameter, if not None, with the array that
                will be its gradient, when nothing more will be added.
        """
        self._final = final
        self._to_come = collections.Counter(
            id(parameter) for part in parts for parameter in part)

    def through(self, parameters: list[chainer.Parameter]) -> None:
        """Notes that the last micro-batch is through a part."""
        for parameter in parameters:
            if self._to_come[id(parameter)] == 1:
                self._finish(parameter)
            self._to_come[id(parameter)] -= 1

    def take(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """As :meth:`add`, for the whole gradient of one part.

        In the last micro-batch the sum is final if no other part adds to it.
        """
        self.add(parameter, gradient)
        self._taken(parameter)

    def add(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """Adds a micro-batch's gradient; the array is only read."""
        buffer, started = self._buffer(parameter, gradient)
        if started:
            buffer += gradient
        else:
            buffer[...] = gradient

    def take_product(self, weight: chainer.Parameter,
                     bias: chainer.Parameter | None,
                     gradient: numpy.ndarray, inputs: numpy.ndarray) -> None:
        """As :meth:`take`, for the parameters of a fully connected layer.

        Both arrays are kept, and must not be changed, until there are
        :data:`ENOUGH` samples, or :meth:`settle` or :meth:`finish` is called.

        Args:
            weight: float32[outputs, inputs].
            bias: float32[outputs]; None: there is none.
            gradient: Of the layer's output, float32[samples, outputs].
            inputs: float32[samples, inputs].
        """
        product = self._products.get(id(weight))
        if product is None or product.bias is not bias:
            # One of them may belong to another product, too.
            self.settle((weight, bias))
            product = _Product(weight, bias, [])
            self._products[id(weight)] = product
            if bias is not None:
                self._products[id(bias)] = product
        product.parts.append((gradient, inputs))
        if sum(len(part) for part, _ in product.parts) >= ENOUGH:
            self.settle([weight])
        self._taken(weight)
        if bias is not None:
            self._taken(bias)

    def settle(self, parameters: Iterable[chainer.Parameter | None]) -> None:
        """Adds the products that are kept of these parameters."""
        for parameter in parameters:
            product = (None if parameter is None
                       else self._products.get(id(parameter)))
            if product is not None:
                for one in (product.weight, product.bias):
                    self._products.pop(id(one), None)
                self._multiply(*product)

    def collect(self, parameters: Iterable[chainer.Parameter]) -> None:
        """Moves the gradients that Chainer's backward left into the sums."""
        for parameter in parameters:
            if parameter.array is not None and parameter.grad is not None:
                self.add(parameter, parameter.grad)
                parameter.cleargrad()

    def finish(self, loss_scale: float | None) -> None:
        """Hands the sums over to ``parameter.grad`` and starts anew."""
        self.settle([product.weight
                     for product in tuple(self._products.values())])
        for parameter in self._parameters.values():
            parameter.grad = self._result(parameter)
            parameter._loss_scale = loss_scale
        self.forget()

    def forget(self) -> None:
        """Starts anew, after a step that failed."""
        self._products.clear()
        self._parameters.clear()
        self._results.clear()
        self._final = None

    # --- details ------------------------------------------------------------

    def _taken(self, parameter: chainer.Parameter) -> None:
        if self.last and self._to_come[id(parameter)] == 1:
            self._to_come[id(parameter)] = 0
            self._finish(parameter)

    def _finish(self, parameter: chainer.Parameter) -> None:
        """Nothing more is to be added."""
        # A function may have left a part of it, as F.forget does.
        self.collect([parameter])
        self.settle([parameter])
        if self._final and id(parameter) in self._parameters:
            self._final(parameter, self._result(parameter))

    def _result(self, parameter: chainer.Parameter) -> Any:
        """The array that will be the parameter's gradient."""
        key = id(parameter)
        if key not in self._results:
            self._results[key] = self._buffers[key].astype(
                parameter.dtype, copy=False)
        return self._results[key]

    def _multiply(self, weight: chainer.Parameter,
                  bias: chainer.Parameter | None, parts: list[Any]) -> None:
        gradient, inputs = map(_joined, zip(*parts, strict=True))
        buffer, started = self._buffer(weight, weight.array)
        if started:
            buffer += gradient.T.dot(inputs)
        else:
            numpy.dot(gradient.T, inputs, out=buffer)
        if bias is not None:
            # Where a batch normalisation follows, what the samples of one
            # micro-batch add nearly cancels; so it is added first.
            for part, _ in parts:
                self.add(bias, part.sum(axis=0))

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


def _joined(parts: tuple[numpy.ndarray, ...]) -> numpy.ndarray:
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)
