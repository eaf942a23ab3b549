"""One layer's run on one micro-batch, and the way back.

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

from . import linear as plain_linear
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


def record(layer: Any, inputs: Arrays, wanted: tuple[bool, ...]
           ) -> tuple[AnyTape, Arrays]:
    """Runs a layer; returns its way back and its outputs.

    Args:
        layer: What is called, with one argument per input.
        inputs: Arrays.
        wanted: For each input, whether its gradient is of use.
    """
    if plain_linear.is_plain(layer, inputs):
        return (plain_linear.LinearTape(layer, inputs[0], wanted[0]),
                (plain_linear.forward(layer, inputs[0]),))
    variables = tuple(
        chainer.Variable(array, requires_grad=want)
        for array, want in zip(inputs, wanted, strict=True))
    outputs = as_variables(layer(*variables))
    return Tape(variables, outputs), tuple(
        output.array for output in outputs)


class Tape:
    """The way back through a layer for one micro-batch.

    It keeps no arrays but those that Chainer's functions retain, and the
    inputs where the layer is more than one function.

    Args:
        inputs: What the layer was called with.
        outputs: What it returned.

    Attributes:
        wants: For each output, whether its gradient is of use.
    """

    def __init__(self, inputs: tuple[chainer.Variable, ...],
                 outputs: tuple[chainer.Variable, ...]) -> None:
        self.wants = tuple(output.requires_grad and output.dtype.kind == 'f'
                           for output in outputs)
        self._inputs = tuple(variable.node for variable in inputs)
        self._function = self._only_function(outputs)
        self._graph: GraphTape | None = None
        if self._function is None:
            self._refuse_strangers(outputs)
            self._graph = GraphTape(inputs, outputs)
        self._deferred: tuple[Any, ...] | None = None

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
        if self._graph is not None:
            return self._graph.backward(gradients, sums, defer)
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

    def _only_function(self, outputs: tuple[chainer.Variable, ...]) -> Any:
        """The one function between inputs and outputs; None if there are
        several, or if somebody wants to look on."""
        functions = {id(output.creator_node): output.creator_node
                     for output in outputs}
        function = functions.popitem()[1]
        if (functions or function is None or chainer.get_function_hooks()
                or function._n_local_function_hooks or chainer.is_debug()):
            return None
        if (type(function).backward_accumulate
                is not chainer.FunctionNode.backward_accumulate):
            return None
        if tuple(output.node for output in outputs) != tuple(
                node() for node in function.outputs):
            return None
        own = [node.requires_grad and not self._is_input(node)
               and not isinstance(node.get_variable_or_none(),
                                  chainer.Parameter)
               for node in function.inputs]
        return None if any(own) else function

    def _refuse_strangers(self, outputs: tuple[chainer.Variable, ...]
                          ) -> None:
        """A variable of another layer would get its gradient too late."""
        waiting, seen = [output.node for output in outputs], set()
        while waiting:
            node = waiting.pop()
            if id(node) in seen or not node.requires_grad:
                continue
            seen.add(id(node))
            if node.creator_node is not None:
                waiting += node.creator_node.inputs
            elif not self._is_input(node) and not isinstance(
                    node.get_variable_or_none(), chainer.Parameter):
                raise ValueError(
                    'it uses a variable of another layer; hand it on from '
                    'layer to layer, as one of a tuple')

    def _is_input(self, node: Any) -> bool:
        return any(node is other for other in self._inputs)

    def _of_inputs(self, found: dict[int, Any]) -> Arrays:
        assert self._function is not None
        gradients = []
        for wanted in self._inputs:
            total = None
            for position, node in enumerate(self._function.inputs):
                item = found.get(position)
                if node is wanted and item is not None:
                    total = item.array if total is None else (
                        total + item.array)
            gradients.append(total)
        return tuple(gradients)


class GraphTape:
    """The way back through any graph between inputs and outputs.

    Args:
        inputs: Variables without creator.
        outputs: What was made of them; an input may be one.

    Attributes:
        wants: For each output, whether its gradient is of use.
    """

    def __init__(self, inputs: tuple[chainer.Variable, ...],
                 outputs: tuple[chainer.Variable, ...]) -> None:
        self.wants = tuple(output.requires_grad and output.dtype.kind == 'f'
                           for output in outputs)
        self._inputs = tuple(variable.node for variable in inputs)
        self._outputs = tuple(output.node for output in outputs)
        # Variables without function must live to get their gradient.
        self._leaves = tuple({
            id(leaf.node): leaf for leaf in (*inputs, *outputs)
            if leaf.creator_node is None}.values())

    def backward(self, gradients: Arrays, sums: GradientSums,
                 defer: bool = False) -> Arrays:
        """As :meth:`Tape.backward`; nothing is left out."""
        leaves = {id(leaf.node): leaf for leaf in self._leaves}
        for node in self._inputs:
            leaves[id(node)].cleargrad()
        starts: dict[int, tuple[Any, Any]] = {}
        for node, gradient in zip(self._outputs, gradients, strict=True):
            if gradient is None or not node.requires_grad:
                continue
            if node.creator_node is None:   # an input or a parameter itself
                leaf = leaves[id(node)]
                leaf.grad = (gradient if leaf.grad is None
                             else leaf.grad + gradient)
            elif id(node) in starts:        # the same variable twice
                starts[id(node)] = node, starts[id(node)][1] + gradient
            else:
                starts[id(node)] = node, gradient
        if starts:
            nodes, seeds = zip(*starts.values(), strict=True)
            chainer.backward([node.get_variable() for node in nodes],
                             list(map(_variable, seeds)))
        return tuple(leaves[id(node)].grad for node in self._inputs)

    def backward_weight(self, sums: GradientSums) -> None:
        """As :meth:`Tape.backward_weight`: nothing was left out."""


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


AnyTape = Any       # Tape, LinearTape, GraphTape: alike in what is called
