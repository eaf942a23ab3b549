"""The way back through a graph, function by function, in Chainer's order."""
# Chainer's loop (Chainer 7.8.1, chainer/_backprop.py, line 146) looks up
# hooks, devices and sums for each function, and writes the gradients of
# parameters at its end.  `Backprop` visits the same functions in the same
# order and makes the same sums; but each parameter's gradient is handed over
# as soon as it is final, and the gradients of weights, which no other
# function needs, can be put off: for the weight half of a zero-bubble
# schedule, or as factors.
#
# A gradient of a fully connected layer's weight is a product of two matrices,
# g^T x.  For several small micro-batches it is one product of what they have
# stacked, which runs faster, and saves the addition of a result as large as
# the weight for each of them: of a step of the paper's network in 64
# micro-batches that is a third.  So the factors are handed over in place of
# the product, and `GradientSums` multiplies.  The layer's other gradient,
# g W, is computed here as well, without the three functions that Chainer
# calls for it.
#
# Every part of a model runs on variables of its own: the graph is cut between
# parts.  So a gradient is final as soon as its part is through.
#
# Chainer's order is that of ranks, the lengths of the ways from the inputs.
# They begin anew where a graph is cut, so that the gradients of a variable
# which several functions use would be added in another order, and rounded
# otherwise, than without the cut.  Where the functions are numbered in the
# order of their calls, the pass goes through them backwards in that order,
# which no cut changes.
from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer import _backprop_utils
from chainer.functions.connection import (
    convolution_2d,
    convolution_nd,
    deconvolution_2d,
    deconvolution_nd,
    embed_id,
    linear,
)

from ..intercept.unchecked_calls import is_watched
from .gradient_sums import GradientSums

Arrays = tuple[Any, ...]        # of arrays; None where there is none

#: Functions whose gradients of input and weights have no work in common.
SEPARABLE = frozenset((
    linear.LinearFunction,
    convolution_2d.Convolution2DFunction,
    convolution_nd.ConvolutionND,
    deconvolution_2d.Deconvolution2DFunction,
    deconvolution_nd.DeconvolutionND,
    embed_id.EmbedIDFunction,
))

_PLAIN = chainer.FunctionNode.backward_accumulate

#: Called with a parameter and its gradient, an array.
Take = Callable[[chainer.Parameter, Any], None]

#: Called with a weight, its bias or None, and the factors of the gradient.
TakeProduct = Callable[
    [chainer.Parameter, 'chainer.Parameter | None', Any, Any], None]


class Backprop:
    """One pass.

    Args:
        uses: How many functions use a parameter, by its node: the gradient
            is handed over when all of them are through.  Gradients of the
            other parameters are handed over at the end.
        take: Called with each parameter's gradient.
        defer: Put off the gradients of weights, see :data:`SEPARABLE`.
        take_product: Called with the factors of gradients, if not None.
        numbers: In which order functions were called, by their ids; None:
            Chainer's order.

    Attributes:
        leaves: The gradients of leaves that are no parameters, by node.
        now: The function that was visited last.
    """

    def __init__(self, uses: Mapping[Any, int], take: Take,
                 defer: bool = False,
                 take_product: TakeProduct | None = None,
                 numbers: Mapping[int, int] | None = None) -> None:
        self.leaves: dict[Any, Any] = {}
        self.now: Any = None
        self._uses, self._take = dict(uses), take
        self._defer = defer
        self._take_product, self._numbers = take_product, numbers
        self._gradients: dict[Any, list[Any]] = {}
        self._put_off: list[tuple[Any, list[int], tuple]] = []
        self._functions: list[tuple[int, int, Any]] = []
        self._seen: set[Any] = set()

    def run(self, starts: Mapping[Any, Any]) -> None:
        """Goes back from some nodes, given with their gradients (arrays)."""
        if not starts:
            return
        for node, gradient in starts.items():
            self._gradients[node] = [chainer.Variable(gradient,
                                                      requires_grad=False)]
            if node._creator_node is not None:
                self._push(node._creator_node)
        with self._quietly(*starts.values()):
            while self._functions:
                self._visit(heapq.heappop(self._functions)[2])
            self._end()

    def weights(self) -> None:
        """Computes the gradients that were put off."""
        later, self._put_off = self._put_off, []
        for function, indexes, gradients in later:
            with self._quietly(*[gradient.array for gradient in gradients]):
                self._apply(function, indexes, gradients)
        self._end()

    @contextlib.contextmanager
    def _quietly(self, *arrays: Any) -> Iterator[None]:
        """Without a graph of gradients, on the arrays' device."""
        with chainer.using_config('enable_backprop', False), \
                chainer.using_device(chainer.backend.get_device_from_array(
                    *arrays)):
            yield

    # --- one function --------------------------------------------------------

    def _push(self, function: Any) -> None:
        if function not in self._seen:
            after = (function.rank if self._numbers is None
                     else self._numbers[id(function)])
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
            later = [index for index in indexes if _is_parameter(
                inputs[index])]
            if later:
                self._put_off.append((function, later, gradients))
                indexes = [index for index in indexes if index not in later]
        if indexes:
            self._apply(function, indexes, gradients)

    def _apply(self, function: Any, indexes: list[int],
               gradients: tuple) -> None:
        """Runs a function's backward and adds its gradients up."""
        self.now = function
        if type(function) is linear.LinearFunction:
            indexes = self._apply_linear(function, indexes, gradients)
        inputs = function.inputs
        lists = {inputs[index]: self._gradients.setdefault(inputs[index], [])
                 for index in indexes}
        if indexes:
            (_watched_step if is_watched(function) else _step)(
                function, tuple(indexes), gradients, lists)
        for node, found in lists.items():
            if not function.lazy_grad_sum:
                _sum(found)
            if found:
                _check(function, node, found)
                if node._creator_node is not None:
                    self._push(node._creator_node)
            if node in self._uses:
                self._uses[node] -= 1
                if self._uses[node] == 0:
                    self._hand_over(node)

    def _apply_linear(self, function: Any, indexes: list[int],
                      gradients: tuple) -> list[int]:
        """Hands over factors in place of gradients, where that can be.

        Returns the indexes of the inputs whose gradients are left to Chainer.
        """
        if self._take_product is None or is_watched(function):
            return indexes
        gradient, = gradients
        nodes, parameters = function.inputs[1:], []
        for index, node in enumerate(nodes, 1):
            if index in indexes:
                parameter = node.get_variable_or_none()
                if self._uses.get(node) != 1 or self._gradients.get(node) or (
                        not isinstance(parameter, chainer.Parameter)):
                    return indexes
                parameters.append(parameter)
        x, weight = [variable.array
                     for variable in function.get_retained_inputs()]
        if gradient is None or 1 not in indexes or not all(
                type(array) is numpy.ndarray and array.dtype == numpy.float32
                for array in (gradient.array, x, weight)):
            return indexes
        for node in nodes:
            if node in self._uses:
                self._uses[node] = 0
        self._take_product(parameters[0],
                           parameters[1] if len(parameters) > 1 else None,
                           gradient.array, x)
        return [index for index in indexes if index == 0]

    # --- leaves --------------------------------------------------------------

    def _hand_over(self, node: Any) -> None:
        gradient = _sum(self._gradients.pop(node))
        if gradient is None:
            return
        variable = node.get_variable_or_none()
        if isinstance(variable, chainer.Parameter):
            self._take(variable, gradient.array)
        else:
            self.leaves[node] = gradient.array

    def _end(self) -> None:
        """Hands over the gradients to which nothing more will be added."""
        waiting = {function.inputs[index]
                   for function, indexes, _ in self._put_off
                   for index in indexes}
        for node in tuple(self._gradients):
            if node not in waiting:
                self._hand_over(node)


class Tape:
    """The way back through a graph for one micro-batch.

    The only arrays kept are those that Chainer's functions retain.

    Args:
        inputs: Variables without creator.
        outputs: Of the graph; an input may be one.
        uses: How many functions use a parameter, by its node, for those
            whose gradients are complete with this pass; see
            :class:`.Backprop`.
        said: Names the layer or call that has made a function.
        numbers: See :class:`.Backprop`.

    Attributes:
        wants: For each output, whether its gradient is of use.
        at: The layer or call that a pass has come to, where it is known.
    """

    def __init__(self, inputs: tuple[chainer.Variable, ...],
                 outputs: tuple[chainer.Variable, ...],
                 uses: Mapping[Any, int] | None = None,
                 said: Callable[[Any], str] | None = None,
                 numbers: Mapping[int, int] | None = None) -> None:
        self.wants = tuple(output.requires_grad and output.dtype.kind == 'f'
                           for output in outputs)
        self._inputs = tuple(variable.node for variable in inputs)
        self._outputs = tuple(output.node for output in outputs)
        self._uses = uses or {}
        self._said, self._numbers = said, numbers
        self._pass: Backprop | None = None

    @property
    def at(self) -> str:
        now = self._pass.now if self._pass else None
        return '' if now is None or self._said is None else self._said(now)

    def backward(self, gradients: Arrays, sums: GradientSums,
                 defer: bool = False) -> Arrays:
        """Gradients of the inputs, from those of the outputs.

        Args:
            gradients: One per output.
            sums: Of the gradients of parameters; some may be left in the
                parameters, by passes inside of functions.
            defer: Leave out what :meth:`backward_weight` can do later.
        """
        self._pass = backprop = Backprop(
            self._uses, sums.take, defer, sums.take_product, self._numbers)
        backprop.run(added(zip(self._outputs, gradients, strict=True)))
        return tuple(backprop.leaves.get(node) for node in self._inputs)

    def backward_weight(self) -> None:
        """Computes what :meth:`backward` with ``defer`` left out."""
        if self._pass is not None:
            self._pass.weights()


def added(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The sum of each node's gradients, from pairs of node and array."""
    starts: dict[Any, Any] = {}
    for node, gradient in pairs:
        if gradient is not None and node.requires_grad:
            starts[node] = (starts[node] + gradient if node in starts
                            else gradient)
    return starts


def _watched_step(function: Any, indexes: tuple[int, ...], gradients: tuple,
                  lists: Mapping[Any, list[Any]]) -> None:
    """As Chainer's loop: calls hooks, and finds NaN in debug mode."""
    hooks = [*chainer.get_function_hooks().values()]
    if function._n_local_function_hooks:
        hooks += function.local_function_hooks.values()
    data = tuple([node.data for node in function.inputs])
    arrays = tuple([None if gradient is None else gradient.array
                    for gradient in gradients])
    for hook in hooks:
        hook.backward_preprocess(function, data, arrays)
    _backprop_utils.backprop_step(function, indexes, gradients, lists,
                                  chainer.is_debug())
    for hook in hooks:
        hook.backward_postprocess(function, data, arrays)


def _step(function: Any, indexes: tuple[int, ...], gradients: tuple,
          lists: Mapping[Any, list[Any]]) -> None:
    """Appends a function's gradients to those of its inputs."""
    if type(function).backward_accumulate is not _PLAIN:
        _backprop_utils.backprop_step(function, indexes, gradients, lists,
                                      False)
        return
    inputs = function.inputs
    found = function.backward(indexes, gradients)
    if len(found) == len(inputs):       # Chainer allows both
        found = [found[index] for index in indexes]
    elif len(found) != len(indexes):
        raise ValueError(
            f'backward of {function.label} returned {len(found)} gradients; '
            f'{len(indexes)} or {len(inputs)} were expected')
    for index, gradient in zip(indexes, found, strict=True):
        if gradient is not None and gradient._data[0] is not None:
            lists[inputs[index]].append(gradient)


def _sum(gradients: list[Any] | None) -> Any:
    """The sum of gradients, which becomes the list's only element."""
    if not gradients:
        return None
    if len(gradients) > 1:
        gradients[:] = [chainer.functions.add(*gradients)]
    return gradients[0]


def _check(function: Any, node: Any, gradients: list[Any]) -> None:
    """Raises Chainer's error for a gradient of another shape or dtype."""
    for gradient in gradients:
        array = gradient._data[0]
        if array.shape != node.shape or array.dtype != node.dtype:
            chainer.variable._check_grad_type(function, node, True, array)


def _is_parameter(node: Any) -> bool:
    return node._creator_node is None and isinstance(
        node.get_variable_or_none(), chainer.Parameter)
