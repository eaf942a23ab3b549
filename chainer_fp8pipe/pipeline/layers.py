"""Some layers of a ``Divisible`` as a part of a pipeline."""
# Each layer of a list needs nothing but what the one before it returns.  So a
# rank runs the layers that it has, on variables of its own.  Recording them
# first, as the calls of a Chain are, would cost the paper's network 3 to 26 %
# of a step.
#
# An interceptor sees the functions of a part as they are called: it calls them
# without Chainer's checks, counts how often they use a parameter, so that
# `Tape` knows when its gradient is final, numbers them, so that it adds in the
# same order whatever the cut, and notes which layer has called a function.
#
# Where a part is to be run forward again before backward, the first pass
# makes a graph that keeps no arrays: each function in it is a `_Later`, which
# knows how to make the call once more.  So layers run once, whatever they
# draw, count or keep, and their functions twice.
#
# Behind the last layer stands the loss, of which the arguments of Chainer's
# functions say how much each micro-batch counts; a function that leaves out
# labels without such an argument is found as it is called.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import math
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
    call_unchecked,
    check_types,
    intercepting,
)
from .backprop import Arrays, Tape
from .batch_statistics import BatchStatistics
from .randomness import Place, seed_at
from .reported import Reports, add, report_of

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
    for item in items:
        if not isinstance(item, (chainer.Variable,
                                 *chainer.get_array_types())):
            kind = 'None' if item is None else f'a {type(item).__name__}'
            raise TypeError(
                f'it returned {kind}; a layer returns a variable, an array, '
                'or a tuple of these')
    if not items:
        raise TypeError('it returned nothing, an empty tuple')
    return tuple(map(chainer.as_variable, items))


class LayersPart:
    """A :class:`.Part` of consecutive layers, and of the loss behind them.

    Args:
        layers: With their indexes in the whole model.
        xp: ``numpy`` or ``cupy``: where the layers are.
        foreign: See :class:`.Divisible`.
    """

    loss: LayersLoss | None = None          # behind the last layer

    def __init__(self, layers: Sequence[Layer], xp: Any = numpy,
                 foreign: Mapping[int, tuple[Any, str]] | None = None
                 ) -> None:
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
        # By micro-batch: the passes that are to be made again.
        self._first: dict[int, _Pass] = {}

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
        calls = _Pass(self)
        with intercepting(calls), blame(lambda: calls.now, micro_batch):
            if chainer.config.in_recomputing:
                values = self._first.pop(micro_batch).again(calls, variables)
            else:
                keeps = chainer.config.enable_backprop
                again = chainer.config.train and not keeps
                # A layer may have a block without a graph of its own.
                with chainer.using_config('enable_backprop', keeps or again), \
                        self.statistics.counting(self._layers[0][0]):
                    if again:
                        self._first[micro_batch] = calls
                        calls.note(variables)
                    values = self._run(calls, micro_batch, variables, place)
                calls.results = [
                    one.node if calls.knows(one.node) else one.array
                    for one in values] if calls.noting else []
        return (Tape(variables, values, calls.final_uses(),
                     describe=calls.describe, numbers=calls.numbers),
                tuple([value.array for value in values]))

    def _run(self, calls: _Pass, micro_batch: int,
             values: tuple[chainer.Variable, ...], place: Place
             ) -> tuple[chainer.Variable, ...]:
        """Runs the layers, and the loss."""
        for index, layer, name in self._layers:
            calls.now, calls.place = name, None
            kind = type(layer) if isinstance(layer, chainer.Link) else layer
            if not any([kind is one for one in _STILL]):
                calls.place = place._replace(layer=index)
                seed_at(calls.place, self.xp)
            values = as_variables(layer(*values))
        if self.loss is not None:
            calls.place = place._replace(layer=index + 1)
            values = self.loss.run(calls, micro_batch, values)
        return values


class _Later(chainer.FunctionNode):
    """A call in a graph without arrays, to be made again.

    Its arguments are nodes of variables, parameters, and copies of arrays.
    """

    def __init__(self, node: chainer.FunctionNode, inputs: Any, of: _Pass
                 ) -> None:
        self.of, self.name, self.place = of, of.now, of.place
        self.config = {name: value for name, value in vars(_LOCAL).items()
                       if value is not of.config.get(name)}
        function = getattr(node, 'function', node)      # an old-style one
        self._function = copy.copy(function)
        # A function may write into what it has: running averages, say.
        vars(self._function).update({
            name: value.copy() for name, value in vars(function).items()
            if isinstance(value, chainer.get_array_types())})
        self.arguments = [
            x if isinstance(x, chainer.Parameter)
            else x.node if isinstance(x, chainer.Variable)
            and of.knows(x.node) else getattr(x, 'array', x).copy()
            for x in inputs]
        self.reads = self.inputs = tuple([
            x for x in self.arguments if isinstance(x, VariableNode)])
        self._state = numpy.random.get_state()

    def make(self, values: Mapping[Any, Any]) -> tuple:
        """The outputs, of variables by the nodes of the first ones."""
        numpy.random.set_state(self._state)
        arguments = tuple([values[x] if isinstance(x, VariableNode) else x
                           for x in self.arguments])
        with contextlib.ExitStack() as stack:
            for name, value in self.config.items():
                stack.enter_context(chainer.using_config(name, value))
            if isinstance(self._function, chainer.Function):
                self._function._node = self._function._owned_node = None
                return as_tuple(self._function(*arguments))
            return self._function.apply(arguments)


class _Pass(Interceptor):
    """One pass forward: its functions, and what is known of each."""

    def __init__(self, part: LayersPart) -> None:
        self.part, self.now = part, ''      # the name of the layer that runs
        # With which it began to draw; None: it draws nothing.
        self.place: Place | None = None
        # Where a mean must leave out no labels: what is to be done else.
        self.remedy = ''
        # In which order functions were called, by their ids.
        self.numbers: dict[int, int] = {}
        self._names: list[str] = []         # of layers, by these numbers
        self._uses: collections.Counter[Any] = collections.Counter()
        self._inner: set[Any] = set()
        self._inside = False
        # To be made again: whether calls are noted, with which settings of
        # Chainer's, what goes in, the calls with their outputs, and results.
        self.noting, self.config = False, dict[str, Any]()
        self._given: list[Any] = []
        self._calls: list[tuple[_Later, list[Any]]] = []
        self.results: list[Any] = []

    def apply(self, node: Any, inputs: Any, original: Callable) -> Any:
        parameters = self._parameters(inputs)
        if self._inside:        # of a function that calls others
            self._inner.update(parameters)
            return call_unchecked(node, inputs, original)
        number = len(self._names)
        key = (number, type(node), *[(x.shape, x.dtype) for x in inputs])
        if key not in self.part.checked:
            check_types(node, inputs)
            self.part.checked.add(key)
        if self.remedy:
            self._check_labels(node, inputs)
        later = _Later(node, inputs, self) if self.noting else None
        self._inside = True
        try:
            with chainer.no_backprop_mode() if self.noting else _NO_BLOCK:
                outputs = call_unchecked(node, inputs, original)
        finally:
            self._inside = False
        self._uses.update(set(parameters))
        self.numbers[id(node)] = number
        self._names.append(self.now)
        if later is not None:
            # What the layer unchains has no creator then, and is a constant.
            nodes = [output.node for output in outputs]
            later.outputs = tuple(map(weakref.ref, nodes))
            for one in nodes:
                one._creator_node, one._rank = later, number + 1
            self._calls.append((later, nodes))
        return outputs

    def _parameters(self, inputs: Any) -> list[Any]:
        """Nodes of parameters; variables must be of this pass."""
        found = []
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                found.append(x.node)
                reference, owner = self.part.foreign.get(id(x), (None, ''))
                if reference is not None and reference() is x:
                    raise ValueError(
                        f'it uses the parameter {x.name} of {owner}, which '
                        'is on another rank; cut so that both are on one '
                        'rank')
            elif isinstance(x, chainer.Variable) and not self._inside:
                creator = x._node._creator_node
                # Backward would go through another part's graph.
                if creator is not None and not (
                        creator.of is self if isinstance(creator, _Later)
                        else id(creator) in self.numbers):
                    raise ValueError(
                        'it uses a variable of another layer or of an '
                        'earlier batch; hand it on from layer to layer, as '
                        'one of a tuple')
        return found

    def leave_out(self, labels: Any, label: int) -> None:
        if self.remedy and bool(
                (getattr(labels, 'array', labels) == label).any()):
            raise ValueError(
                f'label {label} occurs and is ignored inside of a function '
                'that does not say how many count; '
                + self.remedy.format(label))

    def _check_labels(self, node: Any, inputs: Any) -> None:
        function = getattr(node, 'function', node)      # old style
        label = getattr(function, 'ignore_label', None)
        if label is not None and getattr(function, 'normalize', True):
            self.leave_out(inputs[1], label)

    def describe(self, function: Any) -> str:
        """The name of the layer that has called a function."""
        return self._names[self.numbers[id(function)]]

    def final_uses(self) -> dict[Any, int]:
        """How often a parameter is used, if all its gradient comes so."""
        return {node: count for node, count in self._uses.items()
                if node not in self._inner}

    # --- to be made again ----------------------------------------------------

    def note(self, variables: tuple[chainer.Variable, ...]) -> None:
        """Begins to note calls; these variables go in."""
        self.noting, self._given = True, [one.node for one in variables]
        self.config = dict(vars(_LOCAL))

    def knows(self, node: Any) -> bool:
        """Whether there will be a value for a variable's node."""
        return node._creator_node is not None or any(
            node is one for one in self._given)

    def again(self, calls: _Pass, variables: tuple[chainer.Variable, ...]
              ) -> tuple[chainer.Variable, ...]:
        """Makes all calls once more, in another pass."""
        left = collections.Counter(itertools.chain(
            (one for one in self.results if isinstance(one, VariableNode)),
            *[later.reads for later, _ in self._calls]))
        values: dict[Any, Any] = dict(zip(self._given, variables, strict=True))
        seeded = None
        for later, nodes in self._calls:
            calls.now = later.name
            if seeded is not later.place is not None:       # for CuPy
                seeded = later.place
                seed_at(seeded, self.part.xp)
            outputs = later.make(values)
            values.update({node: output for node, output in zip(
                nodes, outputs, strict=True) if left[node]})
            left.subtract(later.reads)
            for node in set(later.reads):
                if not left[node]:
                    del values[node]
        return tuple([
            values[one] if isinstance(one, VariableNode)
            else chainer.as_variable(one) for one in self.results])


# --- the loss ----------------------------------------------------------------

class LayersLoss:
    """The loss behind a list of layers, and metrics.

    Args:
        loss_func: ``loss_func(*outputs, target)``, a mean.
        metrics: Name to a function of the same arguments, a mean as well.
        count: ``count(target)``: the weight of a micro-batch in the loss;
            None: its labels that are not ignored, or else its samples.
    """

    def __init__(self, loss_func: Callable, metrics: Mapping[str, Any],
                 count: Callable | None) -> None:
        self._metrics = [(name, function, counting(function))
                         for name, function in metrics.items()]
        self._loss, self._count = loss_func, count or counting(loss_func)
        self._targets: list[Any] = []
        self.found: Reports = {}        # by metrics

    def begin(self, targets: list[Any]) -> list[float]:
        """Starts a batch; the weight of each micro-batch in the loss."""
        self._targets, self.found = targets, {}
        return [checked_weight(self._count(target)) for target in targets]

    def run(self, calls: _Pass, micro_batch: int, outputs: tuple
            ) -> tuple[chainer.Variable]:
        """The loss of a micro-batch; notes the metrics."""
        target = self._targets[micro_batch]
        loss = _called(calls, 'the loss', self._loss, self._count, outputs,
                       target)
        if not isinstance(loss, chainer.Variable):
            raise TypeError(f'loss_func returned a {type(loss).__name__}; '
                            'it must return a variable')
        noting, calls.noting = calls.noting, False
        # No metric changes what the loss has been given.
        arrays = [output.array for output in outputs]
        for name, function, count in self._metrics:
            with chainer.no_backprop_mode():
                value = _called(calls, f'metric {name!r}', function, count,
                                map(chainer.Variable, arrays), target)
            value = getattr(value, 'array', value)
            report = report_of(value.reshape(()) if getattr(value, 'ndim', 0)
                               else value, checked_weight(count(target)))
            if report.kind != 'number':
                raise TypeError(f'it returned a {type(value).__name__}; it '
                                'must return a number')
            add(self.found, name, report)
        calls.noting, calls.now = noting, 'the loss'
        return (loss,)


def _called(calls: _Pass, name: str, function: Callable, count: Callable,
            outputs: Any, target: Any) -> Any:
    """Calls a loss or metric, whose count must weigh what it is a mean of."""
    calls.now = name
    assert calls.place is not None
    seed_at(calls.place, calls.part.xp)
    calls.remedy = '' if count is not len else (
        'pass loss_weight=lambda t: (t != {}).sum()' if name == 'the loss'
        else 'give the metric an argument ignore_label={}')
    value = function(*outputs, target)
    calls.remedy = ''
    if getattr(value, 'size', 1) != 1:
        raise ValueError(f'it returned shape {value.shape}; it must return a '
                         'scalar, the mean over a micro-batch')
    return value


def checked_weight(value: Any) -> float:
    """A micro-batch's weight as a float, or ValueError."""
    weight = float(getattr(value, 'array', value))
    if not 0 <= weight < math.inf:
        raise ValueError(f'the weight of a micro-batch is {weight}; '
                         'loss_weight must give finite numbers of at least 0')
    return weight


def counting(function: Callable) -> Callable[[Any], float]:
    """How much a loss or metric counts in a target: its labels or ``len``.

    Known from the arguments ``ignore_label`` and ``normalize`` of Chainer's
    functions, also when they were bound by :func:`functools.partial`.
    """
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return len
    values = {name: parameter.default for name, parameter in known.items()}
    while isinstance(function, functools.partial):
        function = function.func
    label = (-1 if function is F.sigmoid_cross_entropy      # built in
             else values.get('ignore_label'))
    if label is None or not values.get('normalize', True):
        return len
    return lambda target: float(numpy.count_nonzero(
        chainer.backends.cuda.to_cpu(target) != label))
