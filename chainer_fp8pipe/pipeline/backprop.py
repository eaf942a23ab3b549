"""The way back through a graph, and the sums of parameters' gradients."""
# Chainer's loop (Chainer 7.8.1, chainer/_backprop.py, line 146) sums the
# gradients of each parameter, and writes them at its end.  `Tape` hands each
# of them over as soon as a function has made it, so that none is kept, and
# those of weights, which no other function needs, can be put off: for the
# weight half of a zero-bubble schedule, or as factors.
#
# A gradient of a fully connected layer's weight is a product of two matrices,
# g^T x.  For several small micro-batches it is one product of what they have
# stacked, which runs faster, and saves the addition of a result as large as
# the weight for each of them: of a step of the paper's network in 64
# micro-batches that is a third.
#
# Chainer's order is that of ranks, the lengths of the ways from the inputs,
# which begin anew where a graph is cut.  Where the functions are numbered in
# the order of their calls, the pass goes through them backwards in that order,
# which no cut changes, and so rounds sums alike.
from __future__ import annotations

import contextlib
import functools
import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer import _backprop_utils
from chainer.functions import connection

from ..intercept.function_calls import is_watched

Arrays = tuple[Any, ...]        # of arrays; None where there is none

#: Samples with which a matrix product runs at full speed, and takes much
#: longer than the addition of its result.
ENOUGH = 256

#: Functions whose gradients of input and weights have no work in common.
SEPARABLE = frozenset((
    connection.linear.LinearFunction,
    connection.convolution_2d.Convolution2DFunction,
    connection.convolution_nd.ConvolutionND,
    connection.deconvolution_2d.Deconvolution2DFunction,
    connection.deconvolution_nd.DeconvolutionND,
    connection.embed_id.EmbedIDFunction,
))


NOT_HANDED_ON = (
    'it uses a variable of another layer or of an earlier batch; hand it on '
    'from layer to layer, as one of a tuple')


class Tape:
    """The way back through a graph for one micro-batch, to be gone once.

    Args:
        inputs: Variables without creator.
        outputs: Of the graph; an input may be one.
        describe: Names the layer or call that has made a function.
        numbers: In which order functions were called, by their ids; None:
            Chainer's order.
    """

    def __init__(self, inputs: tuple[chainer.Variable, ...],
                 outputs: tuple[chainer.Variable, ...],
                 describe: Callable[[Any], str] = lambda function: '',
                 numbers: Mapping[int, int] | None = None) -> None:
        self._inputs = tuple([variable.node for variable in inputs])
        self._outputs = tuple([output.node for output in outputs])
        self._describe, self._numbers = describe, numbers
        self._now: Any = None       # the function that was visited last
        self._gradients: dict[Any, list[Any]] = {}
        # In the order of the way: what makes gradients, or has made them.
        self._put_off: list[Callable[[], object]] = []
        self._functions: list[tuple[int, int, Any]] = []
        self._seen: set[Any] = set()

    @property
    def at(self) -> str:
        """The layer or call that the way has come to, where it is known."""
        return '' if self._now is None else self._describe(self._now)

    def backward(self, gradients: Arrays, taker: Any,
                 defer: bool = False) -> Arrays:
        """Gradients of the inputs, from those of the outputs.

        ``taker`` takes those of parameters; passes inside of functions leave
        some in these.  With ``defer`` those of weights of :data:`SEPARABLE`
        functions are left to :meth:`backward_weight`, which hands all over in
        the same order.
        """
        self._taker, self._defer = taker, defer
        starts = [(node, gradient) for node, gradient in zip(
            self._outputs, gradients, strict=True)
            if gradient is not None and node.requires_grad]
        if starts:
            with _quietly(*[gradient for _, gradient in starts]):
                for node, gradient in starts:
                    self._gradients.setdefault(node, []).append(
                        chainer.Variable(gradient, requires_grad=False))
                    self._go_on(node)
                while self._functions:
                    self._visit(heapq.heappop(self._functions)[2])
        found = [_sum(self._gradients.get(node)) for node in self._inputs]
        self._gradients.clear()
        return tuple([None if one is None else one.array for one in found])

    def backward_weight(self) -> None:
        """Computes what :meth:`backward` with ``defer`` left out."""
        self._defer = False
        for make in self._put_off:
            make()
        self._put_off.clear()

    def _apply_later(self, function: Any, indexes: list[int],
                     gradients: tuple) -> None:
        with _quietly(*[gradient.array for gradient in gradients]):
            self._apply(function, indexes, gradients)

    def _go_on(self, node: Any) -> None:
        """A variable has got a gradient; that of a parameter is handed over.
        """
        parameter, function = _parameter(node), node._creator_node
        if parameter is not None:
            take = functools.partial(self._taker.take, parameter,
                                     _sum(self._gradients.pop(node)).array)
            if self._defer:
                self._put_off.append(take)
            else:
                take()
        elif function is not None and function not in self._seen:
            after = (function.rank if self._numbers is None
                     else self._numbers.get(id(function)))
            if after is None:
                raise ValueError(NOT_HANDED_ON)
            heapq.heappush(self._functions,
                           (-after, len(self._seen), function))
            self._seen.add(function)

    def _visit(self, function: Any) -> None:
        inputs = function.inputs
        indexes = [index for index, node in enumerate(inputs)
                   if node._requires_grad]
        gradients = tuple([
            None if node is None else _sum(self._gradients.pop(node, None))
            for node in [output() for output in function.outputs]])
        if self._defer and type(function) in SEPARABLE:
            later = [index for index in indexes
                     if _parameter(inputs[index]) is not None]
            if later:
                self._put_off.append(functools.partial(
                    self._apply_later, function, later, gradients))
                indexes = [index for index in indexes if index not in later]
        if indexes:
            self._apply(function, indexes, gradients)

    def _apply(self, function: Any, indexes: list[int],
               gradients: tuple) -> None:
        """Runs a function's backward and adds its gradients up."""
        self._now = function
        if type(function) is connection.linear.LinearFunction:
            indexes = self._apply_linear(function, indexes, gradients)
        inputs = function.inputs
        lists = {inputs[index]: self._gradients.setdefault(inputs[index], [])
                 for index in indexes}
        if indexes:
            _step(function, tuple(indexes), gradients, lists)
        for node, found in lists.items():
            for gradient in found:
                array = gradient._data[0]
                if array.shape != node.shape or array.dtype != node.dtype:
                    chainer.variable._check_grad_type(function, node, True,
                                                      array)
            if found:
                self._go_on(node)

    def _apply_linear(self, function: Any, indexes: list[int],
                      gradients: tuple) -> list[int]:
        """Hands over factors in place of gradients, where that can be.

        Returns the indexes of the inputs whose gradients are left to Chainer.
        """
        if self._taker.take_product is None or is_watched(function):
            return indexes
        gradient, = gradients
        parameters = [_parameter(function.inputs[index])
                      for index in indexes if index]
        x, weight = [variable.array
                     for variable in function.get_retained_inputs()]
        if gradient is None or 1 not in indexes or any([
                parameter is None for parameter in parameters]) or not all(
                type(array) is numpy.ndarray and array.dtype == numpy.float32
                for array in (gradient.array, x, weight)):
            return indexes
        self._taker.take_product(*parameters, *[None] * (2 - len(parameters)),
                                 gradient.array, x)
        return [index for index in indexes if index == 0]


@contextlib.contextmanager
def _quietly(*arrays: Any) -> Iterator[None]:
    """Without a graph of gradients, on the arrays' device."""
    with chainer.using_config('enable_backprop', False), \
            chainer.using_device(chainer.backend.get_device_from_array(
                *arrays)):
        yield


def _step(function: Any, indexes: tuple[int, ...], gradients: tuple,
          lists: Mapping[Any, list[Any]]) -> None:
    """Appends a function's gradients to those of its inputs, as Chainer does.

    Calls hooks, and finds NaN in debug mode.
    """
    hooks: list[Any] = []
    if is_watched(function):
        hooks += [*chainer.get_function_hooks().values(),
                  *function.local_function_hooks.values()]
        data = tuple([node.data for node in function.inputs])
        arrays = tuple([None if gradient is None else gradient.array
                        for gradient in gradients])
    for hook in hooks:
        hook.backward_preprocess(function, data, arrays)
    _backprop_utils.backprop_step(function, indexes, gradients, lists,
                                  chainer.is_debug())
    for hook in hooks:
        hook.backward_postprocess(function, data, arrays)


def _sum(gradients: list[Any] | None) -> Any:
    """The sum of gradients, which becomes the list's only element."""
    if not gradients:
        return None
    if len(gradients) > 1:
        gradients[:] = [chainer.functions.add(*gradients)]
    return gradients[0]


def _parameter(node: Any) -> chainer.Parameter | None:
    """The parameter of a node; None: it is of something else."""
    variable = node.get_variable_or_none()
    return (variable if isinstance(variable, chainer.Parameter)
            and node._creator_node is None else None)


class InParameters:
    """Adds gradients to ``parameter.grad``, from which others collect them."""

    take_product = None

    @staticmethod
    def take(parameter: chainer.Parameter, gradient: Any) -> None:
        """Adds one."""
        parameter.grad = (gradient if parameter.grad is None
                          else parameter.grad + gradient)


class GradientSums:
    """Adds up the gradients of a step; float16 is summed in float32.

    Micro-batches come in their order on every rank, so a sum has the same bits
    whatever the cut, of a parameter that one chunk uses.  It takes the memory
    of the last step's, as new memory would cost a tenth of a step; but for
    what somebody still holds.
    """

    def __init__(self) -> None:
        # By weight: also a bias or None, and factors that are put off.
        self._products: dict[int, tuple[chainer.Parameter, Any, list]] = {}
        self._sums: dict[int, tuple[chainer.Parameter, Any]] = {}
        self._memory: dict[int, Any] = {}

    def forget(self) -> None:
        """Starts anew, after a step that failed, too."""
        self._products.clear()
        self._sums.clear()

    def take(self, parameter: chainer.Parameter, gradient: Any) -> None:
        """Adds a gradient; the array is only read."""
        if id(parameter) in self._sums:
            _, total = self._sums[id(parameter)]
            total += gradient
        else:
            self._begin_sum(parameter, gradient)[...] = gradient

    def take_product(self, weight: chainer.Parameter,
                     bias: chainer.Parameter | None,
                     gradient: numpy.ndarray, inputs: numpy.ndarray) -> None:
        """As :meth:`take`, for the parameters of a fully connected layer.

        ``gradient`` is that of its output, float32[samples, outputs], and
        ``inputs`` float32[samples, inputs]; they must not be changed.
        """
        if self._products.get(id(weight), (None, bias))[1] is not bias:
            self.settle([weight])
        *_, parts = self._products.setdefault(id(weight), (weight, bias, []))
        parts.append((gradient, inputs))
        if sum(len(part) for part, _ in parts) >= ENOUGH:
            self.settle([weight])

    def settle(self, parameters: Iterable[chainer.Parameter]) -> None:
        """Adds the products that are kept of these parameters."""
        for parameter in parameters:
            if id(parameter) in self._products:
                self._multiply(*self._products.pop(id(parameter)))

    def collect(self, parameters: Iterable[chainer.Parameter]) -> None:
        """Moves the gradients that Chainer's backward left into the sums."""
        for parameter in parameters:
            if parameter.array is not None and parameter.grad is not None:
                self.take(parameter, parameter.grad)
                parameter.cleargrad()

    def finish(self, loss_scale: float | None) -> None:
        """Hands the sums over to ``parameter.grad`` and starts anew."""
        self.settle([weight for weight, *_ in [*self._products.values()]])
        self._memory = {key: total for key, (_, total) in self._sums.items()}
        for parameter, total in self._sums.values():
            parameter.grad = total.astype(parameter.dtype, copy=False)
            parameter._loss_scale = loss_scale
        self.forget()

    def _begin_sum(self, parameter: chainer.Parameter, like: Any) -> Any:
        """An array for a sum."""
        dtype = numpy.promote_types(like.dtype, numpy.float32)
        array = self._memory.pop(id(parameter), None)
        if array is None or sys.getrefcount(array) > _ALONE or (
                array.shape != like.shape or array.dtype != dtype):
            array = chainer.backend.get_array_module(like).empty(
                like.shape, dtype)
        self._sums[id(parameter)] = parameter, array
        return array

    def _multiply(self, weight: chainer.Parameter,
                  bias: chainer.Parameter | None, parts: list[Any]) -> None:
        gradient, inputs = (
            of[0] if len(of) == 1 else numpy.concatenate(of)
            for of in zip(*parts, strict=True))
        if id(weight) in self._sums:
            self.take(weight, gradient.T.dot(inputs))
        else:
            numpy.dot(gradient.T, inputs,
                      out=self._begin_sum(weight, weight.array))
        if bias is not None:
            # Where a batch normalisation follows, what the samples of one
            # micro-batch add nearly cancels; so it is added first.
            for part, _ in parts:
                self.take(bias, part.sum(axis=0))


def _alone() -> int:
    """References to an array that is in one variable only.

    Views have one, too, and interpreters count differently.
    """
    array = numpy.empty(0)
    return sys.getrefcount(array)


_ALONE = _alone()
