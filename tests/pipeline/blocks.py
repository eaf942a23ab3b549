"""A layer of a ``Divisible`` as a block."""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from chainer_fp8pipe.pipeline import linear
from chainer_fp8pipe.pipeline.backprop import Tape
from chainer_fp8pipe.pipeline.block import AnyTape, Arrays
from chainer_fp8pipe.pipeline.layers import Layer, as_variables, layer_name
from chainer_fp8pipe.pipeline.randomness import Place, at

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

#: Layers that draw no random numbers once their parameters are there, and so
#: are run without seeding, which costs as much as a small layer.
_STILL_LINKS = (L.Linear, L.Convolution2D, L.Deconvolution2D, L.EmbedID,
                L.BatchNormalization, L.LayerNormalization)
_STILL_FUNCTIONS = (F.relu, F.leaky_relu, F.elu, F.sigmoid, F.tanh)


class LayerBlock:
    """A :class:`.Block` of one layer; its place decides what it draws.

    Args:
        layer: Its index in the whole model, and what is called.
        first: The gradient of the input is of no use.
        statistics: A link hook that draws no random numbers.
        initial_seed: Of parameters that get their shape from the first
            input.
        xp: ``numpy`` or ``cupy``: where the layer is.
    """

    def __init__(self, layer: Layer, *, first: bool = False,
                 statistics: Any = None, initial_seed: int = 0,
                 xp: Any = numpy) -> None:
        self._index, self._layer = layer
        self.name = layer_name(*layer)
        self._first = first
        self._statistics = statistics
        self._initial_seed = initial_seed
        self._xp = xp
        self._ready = False

    def record(self, micro_batch: int, inputs: Arrays,
               wanted: tuple[bool, ...] | None, place: Place
               ) -> tuple[AnyTape, Arrays]:
        if wanted is None:
            wanted = tuple(not self._first and array.dtype.kind == 'f'
                           for array in inputs)
        with self._seeded(place):
            return record(self._layer, inputs, wanted)

    def infer(self, micro_batch: int, inputs: Arrays,
              place: Place) -> Arrays:
        with self._seeded(place):
            return _call(self._layer, inputs)

    def params(self) -> Iterable[chainer.Parameter]:
        return (self._layer.params()
                if isinstance(self._layer, chainer.Link) else ())

    def links(self) -> Iterable[chainer.Link]:
        return (self._layer.links()
                if isinstance(self._layer, chainer.Link) else ())

    @contextlib.contextmanager
    def _seeded(self, place: Place) -> Iterator[None]:
        layer = self._layer
        if self._ready and _draws_nothing(layer) and all(
                hook is self._statistics        # others may draw
                for hook in chainer._get_link_hooks().values()):
            yield
            return
        initial = None
        if any(parameter.array is None for parameter in self.params()):
            # Initial values must be the same on every replica.
            initial = Place(self._initial_seed, 0, self._index, 0)
        else:
            self._ready = True
        with at(place._replace(layer=self._index), self._xp, initial):
            yield


def record(layer: Any, inputs: Arrays, wanted: tuple[bool, ...]
           ) -> tuple[AnyTape, Arrays]:
    """Runs a layer; returns its tape and its outputs.

    ``wanted`` says for each input whether its gradient is of use.
    """
    if linear.is_plain(layer, inputs):
        return (linear.LinearTape(layer, inputs[0], wanted[0]),
                (linear.forward(layer, inputs[0]),))
    variables = tuple(
        chainer.Variable(array, requires_grad=want)
        for array, want in zip(inputs, wanted, strict=True))
    outputs = as_variables(layer(*variables))
    _refuse_strangers(variables, outputs)
    return Tape(variables, outputs), tuple(
        output.array for output in outputs)


def _call(layer: Any, arrays: Arrays) -> Arrays:
    """Runs a layer without a graph, but on variables as in training.

    For arrays some functions return another dtype, and in-place operators
    change the array, where those of a variable make a new one.
    """
    if linear.is_plain(layer, arrays):
        return (linear.forward(layer, arrays[0]),)
    outputs = layer(*[chainer.Variable(array, requires_grad=False)
                      for array in arrays])
    return tuple(output.array for output in as_variables(outputs))


def _draws_nothing(layer: Any) -> bool:
    """Whether it does not; hooks may, and may have been added just now."""
    if chainer.get_function_hooks():
        return False
    if type(layer) in _STILL_LINKS:
        return not layer._local_link_hooks
    return any(layer is function for function in _STILL_FUNCTIONS)


def _refuse_strangers(inputs: tuple[chainer.Variable, ...],
                      outputs: tuple[chainer.Variable, ...]) -> None:
    """Raises for a variable of another layer: its gradient would be late."""
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
