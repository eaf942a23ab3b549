"""A block's run on one micro-batch, and the way back.

Every block runs on variables of its own: the graph is cut between blocks.  So
a gradient is final as soon as its block is through, and the input half of a
backward pass can be run without the weight half.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer

from . import linear as plain_linear
from .backprop import Backprop, Clock, added
from .gradient_sums import GradientSums
from .layers import as_variables

Arrays = tuple[Any, ...]        # of arrays; None where there is none


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
    _refuse_strangers(variables, outputs)
    return Tape(variables, outputs), tuple(
        output.array for output in outputs)


class Tape:
    """The way back through a graph for one micro-batch.

    It keeps no arrays but those that Chainer's functions retain.

    Args:
        inputs: Variables without creator.
        outputs: What was made of them; an input may be one.
        uses: How many functions use a parameter, by its node, for those
            whose gradients are complete with this pass; see
            :class:`.Backprop`.
        clock: Times the functions; None: nobody does.

    Attributes:
        wants: For each output, whether its gradient is of use.
    """

    def __init__(self, inputs: tuple[chainer.Variable, ...],
                 outputs: tuple[chainer.Variable, ...],
                 uses: Mapping[Any, int] | None = None,
                 clock: Clock | None = None) -> None:
        self.wants = tuple(output.requires_grad and output.dtype.kind == 'f'
                           for output in outputs)
        self._inputs = tuple(variable.node for variable in inputs)
        self._outputs = tuple(output.node for output in outputs)
        self._uses, self._clock = uses or {}, clock
        self._pass: Backprop | None = None

    def backward(self, gradients: Arrays, sums: GradientSums,
                 defer: bool = False) -> Arrays:
        """Gradients of the inputs, from those of the outputs.

        Args:
            gradients: One per output.
            sums: Of the gradients of parameters; some may be left in the
                parameters, by passes inside of functions.
            defer: Leave out what :meth:`backward_weight` can do later.
        """
        backprop = Backprop(self._uses, sums.take, defer, self._clock)
        backprop.run(added(zip(self._outputs, gradients, strict=True)))
        if defer:
            self._pass = backprop
        return tuple(backprop.leaves.get(node) for node in self._inputs)

    def backward_weight(self, sums: GradientSums) -> None:
        """What a deferring :meth:`backward` left out."""
        if self._pass is not None:
            self._pass.weights()
            self._pass = None


def _refuse_strangers(inputs: tuple[chainer.Variable, ...],
                      outputs: tuple[chainer.Variable, ...]) -> None:
    """A variable of another layer would get its gradient too late."""
    own = {variable.node for variable in inputs}
    waiting, seen = [output.node for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node in seen or not node.requires_grad:
            continue
        seen.add(node)
        if node.creator_node is not None:
            waiting += node.creator_node.inputs
        elif node not in own and not isinstance(
                node.get_variable_or_none(), chainer.Parameter):
            raise ValueError(
                'it uses a variable of another layer; hand it on from '
                'layer to layer, as one of a tuple')


AnyTape = Any       # Tape, LinearTape: alike in what is called
