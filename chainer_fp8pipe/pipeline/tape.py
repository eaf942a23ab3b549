"""One layer's run on one micro-batch, and its way back.

Every layer runs on variables of its own: the graph is cut between layers.
So a gradient is final as soon as its layer is through, the input half of a
backward pass can be run without the weight half, and a layer that is one
function (most are) needs no search through a graph.
"""
from __future__ import annotations

from typing import Any

import chainer
from chainer.functions.connection import (
    convolution_2d,
    convolution_nd,
    deconvolution_2d,
    deconvolution_nd,
    embed_id,
    linear,
)

from .gradient_sums import GradientSums
from .layers import as_variables

Arrays = tuple[Any, ...]        # of arrays; None where there is none

#: Functions whose gradients of input and weights have no work in common.
_SEPARABLE = (
    linear.LinearFunction,
    convolution_2d.Convolution2DFunction,
    convolution_nd.ConvolutionND,
    deconvolution_2d.Deconvolution2DFunction,
    deconvolution_nd.DeconvolutionND,
    embed_id.EmbedIDFunction,
)


class Tape:
    """A layer's inputs and outputs for one micro-batch.

    Args:
        layer: What is called, with one argument per input.
        inputs: Arrays.
        wanted: For each input, whether its gradient is of use.
    """

    def __init__(self, layer: Any, inputs: Arrays,
                 wanted: tuple[bool, ...]) -> None:
        self._inputs = tuple(
            chainer.Variable(array, requires_grad=want)
            for array, want in zip(inputs, wanted, strict=True))
        self._outputs = as_variables(layer(*self._inputs))
        self._function = self._only_function()
        self._deferred: tuple[Any, ...] | None = None

    @property
    def arrays(self) -> Arrays:
        """The outputs."""
        return tuple(output.array for output in self._outputs)

    @property
    def wants(self) -> tuple[bool, ...]:
        """For each output, whether its gradient is of use."""
        return tuple(output.requires_grad and output.dtype.kind == 'f'
                     for output in self._outputs)

    def backward(self, gradients: Arrays, sums: GradientSums,
                 defer: bool = False) -> Arrays:
        """Gradients of the inputs, from those of the outputs.

        Gradients of parameters are added to ``sums``, or left in the
        parameters where Chainer's own backward puts them.

        Args:
            gradients: One per output.
            sums: Of the gradients of parameters.
            defer: Leave out what :meth:`backward_weight` can do later.
        """
        if self._function is None:
            return self._through_graph(gradients)
        function = self._function
        inputs: list[int] = []
        weights: list[int] = []
        for position, node in enumerate(function.inputs):
            if node.requires_grad:
                (inputs if self._is_input(node) else weights).append(position)
        gradient = tuple(map(_variable, gradients))
        if all(item is None for item in gradient):
            return (None,) * len(self._inputs)
        found: dict[int, Any] = {}
        if defer and weights and isinstance(function, _SEPARABLE):
            self._deferred = gradient, tuple(weights)
            weights = []
        if inputs or weights:
            found = _apply(function, tuple(sorted(inputs + weights)), gradient)
        for position in weights:
            _add(sums, function.inputs[position], found.get(position))
        return self._of_inputs(found)

    def backward_weight(self, sums: GradientSums) -> None:
        """What a deferring :meth:`backward` left out."""
        if self._deferred is not None:
            gradient, weights = self._deferred
            found = _apply(self._function, weights, gradient)
            for position in weights:
                _add(sums, self._function.inputs[position],
                     found.get(position))
            self._deferred = None

    # --- the way back -------------------------------------------------------

    def _only_function(self) -> Any:
        """The one function between inputs and outputs; None if there are
        several, or if somebody wants to look on."""
        functions = {id(output.creator_node): output.creator_node
                     for output in self._outputs}
        function = functions.popitem()[1]
        if (functions or function is None or chainer.get_function_hooks()
                or function._n_local_function_hooks or chainer.is_debug()):
            return None
        if (type(function).backward_accumulate
                is not chainer.FunctionNode.backward_accumulate):
            return None
        if tuple(output.node for output in self._outputs) != tuple(
                node() for node in function.outputs):
            return None
        own = [node.requires_grad and not self._is_input(node)
               and not isinstance(node.get_variable_or_none(),
                                  chainer.Parameter)
               for node in function.inputs]
        return None if any(own) else function

    def _is_input(self, node: Any) -> bool:
        return any(node is variable.node for variable in self._inputs)

    def _of_inputs(self, found: dict[int, Any]) -> Arrays:
        assert self._function is not None
        gradients = []
        for variable in self._inputs:
            total = None
            for position, node in enumerate(self._function.inputs):
                item = found.get(position)
                if node is variable.node and item is not None:
                    total = item.array if total is None else (
                        total + item.array)
            gradients.append(total)
        return tuple(gradients)

    def _through_graph(self, gradients: Arrays) -> Arrays:
        roots: dict[int, tuple[chainer.Variable, Any]] = {}
        for output, gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                key = id(output.node)
                if key in roots:        # the same variable twice
                    gradient = roots[key][1] + gradient
                roots[key] = output, gradient
        for variable in self._inputs:
            variable.cleargrad()
        starts = []
        for output, gradient in roots.values():
            # An input that is passed on has no function to go back through.
            if output.creator_node is None:
                for variable in self._inputs:
                    if variable.node is output.node:
                        variable.grad = gradient
            else:
                starts.append((output, gradient))
        if starts:
            outputs, seeds = zip(*starts, strict=True)
            chainer.backward(list(outputs), list(map(_variable, seeds)))
        return tuple(variable.grad for variable in self._inputs)


def _variable(array: Any) -> chainer.Variable | None:
    return None if array is None else chainer.Variable(
        array, requires_grad=False)


def _apply(function: Any, positions: tuple[int, ...],
           gradient: tuple) -> dict[int, Any]:
    """The function's own backward, for some of its inputs."""
    with chainer.using_config('enable_backprop', False):
        found = function.backward(positions, gradient)
    if len(found) == len(function.inputs):      # Chainer allows both
        found = [found[position] for position in positions]
    return dict(zip(positions, found, strict=True))


def _add(sums: GradientSums, node: Any, gradient: Any) -> None:
    if gradient is not None:
        sums.add(node.get_variable(), gradient.array)
