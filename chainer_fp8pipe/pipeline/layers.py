"""Some layers of a ``Divisible`` as a part of a pipeline."""
# Each layer of a list needs nothing but what the one before it returns.  So a
# rank runs the layers that it has, on variables of its own.  Recording them
# first, as the calls of a Chain are, would cost the paper's network 3 to 26 %
# of a step.
#
# An interceptor sees the functions of a part as they are called: it calls them
# without Chainer's checks, numbers them, so that `Tape` adds in the same order
# whatever the cut, and notes which layer has called a function.
#
# Where a part is to be run forward again before backward, the first pass
# makes a graph that keeps no arrays: each function in it is a `_Later`, which
# knows how to make the call once more.  So layers run once, whatever they
# draw, count or keep, and their functions twice.
from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.variable import VariableNode

from ..intercept.function_calls import (
    Interceptor,
    again,
    call_unchecked,
    function_of,
    intercepting,
)
from .backprop import NOT_HANDED_ON, Arrays, Tape
from .means import BatchStatistics
from .randomness import Place, seed_at

#: A layer of the whole model: its index there, and what is called.
Layer = tuple[int, Callable]

#: Layers that draw no random numbers, and so are run without seeding, which
#: costs as much as a small layer.
_STILL = (L.Linear, L.Convolution2D, L.Deconvolution2D, L.EmbedID,
          L.BatchNormalization, L.LayerNormalization,
          F.relu, F.leaky_relu, F.elu, F.sigmoid, F.tanh)


_LOCAL: Any = chainer.config._local
_NO_BLOCK: Any = contextlib.nullcontext()


class LayerError(RuntimeError):
    """A layer failed; the message names it, its cause is the exception."""


def kind_of(layer: Any) -> str:
    """The name of a layer's class or function: ``'Linear'``."""
    while isinstance(layer, functools.partial):
        layer = layer.func
    return getattr(layer, '__name__', '') or type(layer).__name__


def layer_name(index: int, layer: Any) -> str:
    """The name of a layer in every message: ``'layer 3 (Linear)'``."""
    return f'layer {index} ({kind_of(layer)})'


@contextlib.contextmanager
def blame(name: Callable[[], str], micro_batch: int) -> Iterator[None]:
    """Turns an exception inside into a :class:`LayerError` with the name."""
    try:
        yield
    except LayerError:
        raise
    except Exception as error:
        raise LayerError(f'{name()}, micro-batch {micro_batch}: '
                         f'{type(error).__name__}: {error}') from error


def as_tuple(value: Any) -> tuple:
    """A layer's return value as the arguments of the next layer."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def as_variables(value: Any) -> tuple[chainer.Variable, ...]:
    """A layer's return value as variables, or TypeError."""
    if type(value) is chainer.Variable:
        return (value,)
    items = as_tuple(value)
    kinds = (chainer.Variable, *chainer.get_array_types())
    if not items or not all(isinstance(item, kinds) for item in items):
        raise TypeError(f'it returned {value!r:.80}; a layer returns a '
                        'variable, an array, or a tuple of these')
    return tuple(map(chainer.as_variable, items))


class LayersPart:
    """A :class:`.Part` of consecutive layers, and of the loss behind them.

    Args:
        layers: With their indexes in the whole model.
        xp: ``numpy`` or ``cupy``: where the layers are.
        foreign: See :class:`.Divisible`.
    """

    #: Gives the loss of a pass, a micro-batch, and the last layer's outputs.
    loss: Callable[..., tuple[chainer.Variable, ...]] | None = None

    def __init__(self, layers: Sequence[Layer], xp: Any = numpy,
                 foreign: Mapping[Any, str] | None = None) -> None:
        self._layers = [(index, layer, layer_name(index, layer))
                        for index, layer in layers]
        self.name = ' to '.join(dict.fromkeys(
            [self._layers[0][2], self._layers[-1][2]]))
        self.parameters: list[chainer.Parameter] = list({
            id(parameter): parameter for _, layer in layers
            if isinstance(layer, chainer.Link)
            for parameter in layer.params()}.values())
        self.xp, self.foreign = xp, foreign or {}
        self.statistics = BatchStatistics()
        # Calls that Chainer has checked.  A wrong shape may not be an error
        # of NumPy's, but broadcast.
        self.checked: set[tuple] = set()
        # By micro-batch: of which the calls are to be made again.
        self._again: dict[int, _Pass] = {}

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """See :meth:`.Part.record`."""
        # Also without a graph the layers are called with variables: for
        # arrays some functions return another dtype, and in-place operators
        # change the array, where those of a variable make a new one.
        variables = tuple([
            chainer.Variable(array, requires_grad=self._layers[0][0] > 0
                             and array.dtype.kind == 'f')
            for array in inputs])
        again, keeps = (chainer.config.in_recomputing,
                        chainer.config.enable_backprop)
        calls = _Pass(self, variables, chainer.config.train and not (
            keeps or again))
        with intercepting(calls), blame(lambda: calls.now, micro_batch):
            if again:
                values = self._again.pop(micro_batch).make(calls, variables)
            else:
                # A layer may have a block without a graph of its own.
                with chainer.using_config(
                        'enable_backprop', keeps or calls.noting
                        ), self.statistics.counting(self._layers[0][0]):
                    values = self._run(calls, micro_batch, variables, place)
                if calls.noting:
                    calls.results = list(map(calls.stands_for, values))
                    self._again[micro_batch] = calls
        return (Tape(variables, values, calls.describe, calls.numbers),
                tuple([value.array for value in values]))

    def _run(self, calls: _Pass, micro_batch: int,
             values: tuple[chainer.Variable, ...], place: Place
             ) -> tuple[chainer.Variable, ...]:
        """Runs the layers, and the loss."""
        for index, layer, name in self._layers:
            calls.now, calls.place = name, None
            kind = type(layer) if isinstance(layer, chainer.Link) else layer
            if not any([kind is one for one in _STILL]):
                calls.seed(place._replace(layer=index))
            values = as_variables(layer(*values))
        if self.loss is not None:
            calls.now = 'the loss'
            calls.seed(place._replace(layer=index + 1))
            values = self.loss(calls, micro_batch, values)
        return values


class _Pass(Interceptor):
    """One pass forward: its functions, and what is known of each.

    If ``noting``, its calls are to be made once more, from other variables.
    """

    results: list[Any]

    def __init__(self, part: LayersPart,
                 variables: tuple[chainer.Variable, ...], noting: bool
                 ) -> None:
        self.part, self.now = part, ''      # the name of the layer that runs
        self.noting, self._given = noting, [one.node for one in variables]
        self.config = dict(vars(_LOCAL))    # Chainer's settings
        # With the nodes of their outputs.
        self.calls: list[tuple[_Later, list[Any]]] = []
        # With which it began to draw; None: it draws nothing.
        self.place: Place | None = None
        # Whether a mean must leave out no labels.
        self.counts_all = False
        # In which order functions were called, by their ids.
        self.numbers: dict[int, int] = {}
        self._names: list[str] = []         # of layers, by these numbers
        self._inside = False

    def seed(self, place: Place) -> None:
        """What follows draws from here."""
        self.place = place
        seed_at(place, self.part.xp)

    def apply(self, node: Any, inputs: Any, original: Callable) -> Any:
        for x in inputs:
            if isinstance(x, chainer.Parameter) and (
                    x.node in self.part.foreign):
                raise ValueError(
                    f'it uses the parameter {x.name} of '
                    f'{self.part.foreign[x.node]}, which is on another rank; '
                    'cut so that both are on one rank')
        if self._inside:        # of a function that calls others
            return call_unchecked(node, inputs, original)
        number = len(self._names)
        key = (number, type(node), *[(x.shape, x.dtype) for x in inputs])
        if self.counts_all:
            function = function_of(node)
            label = getattr(function, 'ignore_label', None)
            if label is not None and getattr(function, 'normalize', True):
                self.leave_out(inputs[1], label)
        later = self.noting and _Later(node, inputs, self)
        self._inside = True
        try:
            with chainer.no_backprop_mode() if later else _NO_BLOCK:
                outputs = (call_unchecked(node, inputs, original)
                           if key in self.part.checked
                           else original(node, inputs))
        finally:
            self._inside = False
        self.part.checked.add(key)
        self.numbers[id(node)] = number
        self._names.append(self.now)
        if later:
            nodes = [output.node for output in outputs]
            self.calls.append((later, nodes))
            # A variable that the layer unchains loses it, and is a constant.
            later.outputs = tuple(map(weakref.ref, nodes))
            for one in nodes:
                one._creator_node, one._rank = later, number + 1
        return outputs

    def call_link(self, link: Any, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        return self.part.statistics.call_link(link, args, kwargs, original)

    def leave_out(self, labels: Any, label: int) -> None:
        if self.counts_all and bool(
                (getattr(labels, 'array', labels) == label).any()):
            raise ValueError(
                f'label {label} occurs, which the mean leaves out; pass '
                f'loss_weight=lambda t: (t != {label}).sum()')

    def describe(self, function: Any) -> str:
        """The name of the layer that has called a function."""
        return self._names[self.numbers[id(function)]]

    # --- to be made again ----------------------------------------------------

    def stands_for(self, x: Any) -> Any:
        """The node of a variable that will be made; a parameter; an array."""
        if not isinstance(x, chainer.Variable) or isinstance(
                x, chainer.Parameter):
            return x
        creator = x.node._creator_node
        if creator is None:
            return (x.node if any(x.node is one for one in self._given)
                    else x.array)
        if getattr(creator, 'of', None) is not self:
            raise ValueError(NOT_HANDED_ON)
        return x.node

    def make(self, calls: _Pass, variables: tuple[chainer.Variable, ...]
             ) -> tuple[chainer.Variable, ...]:
        """Makes all calls once more, in another pass; the results."""
        # Where each value is used last.
        last = {node: number for number, (later, _) in enumerate(self.calls)
                for node in later.inputs}
        last.update((one, len(self.calls)) for one in self.results
                    if isinstance(one, VariableNode))
        values: dict[Any, Any] = dict(zip(self._given, variables, strict=True))
        for number, (later, nodes) in enumerate(self.calls):
            calls.now = later.name
            if later.place is not None and later.place is not calls.place:
                calls.seed(later.place)         # for CuPy
            values.update(zip(nodes, later.make(values), strict=True))
            for node in {*later.inputs, *nodes}:
                if last.get(node, number) == number:
                    del values[node]
        return tuple([
            values[one] if isinstance(one, VariableNode)
            else chainer.as_variable(one) for one in self.results])


class _Later(chainer.FunctionNode):
    """A call in a graph without arrays, to be made again.

    Its arguments are nodes of variables, parameters, and copies of arrays.
    """

    def __init__(self, node: chainer.FunctionNode, inputs: Any, of: _Pass
                 ) -> None:
        self.of, self.name, self.place = of, of.now, of.place
        self._config = {name: value for name, value in vars(_LOCAL).items()
                        if value is not of.config.get(name)}
        # A function may write into what it has: running averages, say.
        self._twin = again(node, {
            name: value.copy() if isinstance(
                value, chainer.get_array_types()) else value
            for name, value in vars(function_of(node)).items()})
        self._arguments = [
            x if isinstance(x, (chainer.Parameter, VariableNode))
            else x.copy() for x in map(of.stands_for, inputs)]
        self.inputs = tuple([
            x for x in self._arguments if isinstance(x, VariableNode)])
        self._state = numpy.random.get_state()

    def make(self, values: Mapping[Any, Any]) -> tuple:
        """The outputs, of variables by the nodes of the first ones."""
        numpy.random.set_state(self._state)
        arguments = tuple([values[x] if isinstance(x, VariableNode) else x
                           for x in self._arguments])
        with contextlib.ExitStack() as stack:
            for name, value in self._config.items():
                stack.enter_context(chainer.using_config(name, value))
            return self._twin.apply(arguments)
