"""Some layers of a ``Divisible`` as a part of a pipeline."""
# A list of layers is cut where it was told, and each of its layers needs
# nothing but what the one before it returns.  So a rank runs the layers that
# it has, on variables of its own; unlike a Chain, whose calls are to be found
# out first, it needs no trace, no stand-ins for what other ranks have, and
# nothing of a batch but the inputs of its own layers.  (For a time every rank
# went through all layers, as those of a Chain do: that cost the paper's
# network 5 to 10 % of a step.)
#
# All layers of a part are in one graph.  An interceptor sees their functions
# as they are called: it calls them without Chainer's checks, counts how often
# they use a parameter, so that `Tape` knows when its gradient is final,
# numbers them, so that it adds in the same order whatever the cut, and notes
# which layer has called a function, for messages.
#
# Where a part is run forward again before backward, layers must do the same
# again, and what they count must move once.  So objects that are layers get
# the attributes and generators back that they had (`_Before`); and some
# numbers of each layer's output are compared with those of the first time, as
# a function may draw from a generator that nobody finds.
#
# Behind the last layer stands the loss, of which the arguments of Chainer's
# functions say how much each micro-batch counts; a function that ignores
# labels without such an argument is found in the loss's graph.
from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.functions.normalization.batch_normalization import (
    BatchNormalization,
)

from ..intercept.function_calls import (
    Interceptor,
    call_unchecked,
    check_types,
    intercepting,
)
from .backprop import Arrays, Tape
from .batch_statistics import BatchStatistics
from .randomness import Place, at

#: A layer of the whole model: its index there, and what is called.
Layer = tuple[int, Callable]
#: How much a target counts in a mean.
Count = Callable[[Any], float]

#: Layers that draw no random numbers, and so are run without seeding, which
#: costs as much as a small layer.
_STILL_LINKS = (L.Linear, L.Convolution2D, L.Deconvolution2D, L.EmbedID,
                L.BatchNormalization, L.LayerNormalization)
_STILL_FUNCTIONS = (F.relu, F.leaky_relu, F.elu, F.sigmoid, F.tanh)


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
def blame(name: str | Callable[[], str], micro_batch: int) -> Iterator[None]:
    """Turns an exception inside into a :class:`LayerError` with the name."""
    try:
        yield
    except LayerError:
        raise
    except Exception as error:
        said = name if isinstance(name, str) else name()
        raise LayerError(f'{said}, micro-batch {micro_batch}: '
                         f'{type(error).__name__}: {error}') from error


def as_tuple(value: Any) -> tuple:
    """A layer's return value as the arguments of the next layer."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def as_variables(value: Any) -> tuple[chainer.Variable, ...]:
    """A layer's return value as variables.

    Raises:
        TypeError: The next layer could not take the value.
    """
    if type(value) is chainer.Variable:
        return (value,)
    for item in as_tuple(value):
        if not isinstance(item, (chainer.Variable,
                                 *chainer.get_array_types())):
            said = 'None' if item is None else f'a {type(item).__name__}'
            raise TypeError(
                f'it returned {said}; a layer returns a variable, an array, '
                'or a tuple of these')
    if isinstance(value, (tuple, list)) and not value:
        raise TypeError('it returned nothing, an empty tuple')
    return tuple(map(chainer.as_variable, as_tuple(value)))


class LayersPart:
    """A :class:`.Part` of consecutive layers, and of the loss behind them.

    Args:
        layers: With their indexes in the whole model.
        xp: ``numpy`` or ``cupy``: where the layers are.
        foreign: By identity, parameters of layers that are elsewhere (weak
            references), with the names of the layers.

    Attributes:
        loss: ``loss(micro_batch, outputs, seeded)`` behind the last layer;
            ``seeded()`` is a block to draw in.  None: there is none, and the
            outputs are those of the last layer.
    """

    loss: Callable | None = None

    def __init__(self, layers: Sequence[Layer], xp: Any = numpy,
                 foreign: Mapping[int, tuple[Any, str]] | None = None
                 ) -> None:
        self._layers = [(index, layer, layer_name(index, layer))
                        for index, layer in layers]
        names = self._layers[0][2], self._layers[-1][2]
        self.name = ' to '.join(dict.fromkeys(names))
        links = [layer for _, layer in layers
                 if isinstance(layer, chainer.Link)]
        self.parameters: list[chainer.Parameter] = list({
            id(parameter): parameter for link in links
            for parameter in link.params()}.values())
        self.links = [one for link in links for one in link.links()]
        self._xp, self._foreign = xp, foreign or {}
        self._checked: set[tuple] = set()
        # By micro-batch, for parts that are run again.
        self._before: dict[int, _Before] = {}

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """See :meth:`.Part.record`."""
        index = self._layers[0][0]
        # Also without a graph the layers are called with variables: for
        # arrays some functions return another dtype, and in-place operators
        # change the array, where those of a variable make a new one.
        variables = values = tuple([
            chainer.Variable(array, requires_grad=index > 0
                             and array.dtype.kind == 'f')
            for array in inputs])
        calls, draws = (_Calls(self._checked, self._foreign),
                        _hooks_may_draw())
        with intercepting(calls), blame(
                lambda: calls.now, micro_batch), self._once(
                micro_batch) as check:
            for index, layer, name in self._layers:
                calls.now = name
                if draws or _draws(layer):
                    with at(place._replace(layer=index), self._xp):
                        values = as_variables(layer(*values))
                else:
                    values = as_variables(layer(*values))
                if check is not None:
                    check(values)
            if self.loss is not None:
                calls.now = 'the loss'
                values = self.loss(micro_batch, values, lambda: at(
                    place._replace(layer=index + 1), self._xp))
        return (Tape(variables, values, calls.final_uses(), said=calls.said,
                     numbers=calls.numbers),
                tuple([value.array for value in values]))

    @contextlib.contextmanager
    def _once(self, micro_batch: int) -> Iterator[Callable | None]:
        """A block of which two for a micro-batch have the effects of one.

        Gives what is to be called with each layer's outputs, or None where
        there is no other block.
        """
        if chainer.config.in_recomputing:
            before = self._before.pop(micro_batch)
            with before.again():
                yield before.compare
        elif chainer.config.train and not chainer.config.enable_backprop:
            before = _Before([layer for _, layer, _ in self._layers])
            self._before[micro_batch] = before
            yield before.note
        else:
            yield None

    def normalises(self, micro_batch: int) -> bool:
        """See :meth:`.Part.normalises`; a function may use any link."""
        return True

    def keeps(self, link: chainer.Link) -> bool:
        """See :meth:`.Part.keeps`."""
        return True


class _Calls(Interceptor):
    """Calls the functions of layers, numbers them, and counts parameters.

    Args:
        checked: Calls that Chainer has checked.  A wrong shape may not be an
            error of NumPy's, but broadcast.
        foreign: As for :class:`LayersPart`.

    Attributes:
        now: The name of the layer that runs.
        numbers: In which order functions were called, by their ids.
    """

    def __init__(self, checked: set[tuple],
                 foreign: Mapping[int, tuple[Any, str]]) -> None:
        self.now, self._checked, self._foreign = '', checked, foreign
        self.numbers: dict[int, int] = {}
        self._names: dict[int, str] = {}    # of layers, by such an id
        self._number = 0        # ids are used again
        self._uses: collections.Counter[Any] = collections.Counter()
        self._inner: set[Any] = set()
        self._inside = False

    def apply(self, node: Any, inputs: Any, original: Callable) -> Any:
        parameters = []
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                parameters.append(x.node)
                reference, owner = self._foreign.get(id(x), (None, ''))
                if reference is not None and reference() is x:
                    raise ValueError(
                        f'it uses the parameter {x.name} of {owner}, which '
                        'is on another rank; cut so that both are on one '
                        'rank')
            elif isinstance(x, chainer.Variable) and not self._inside:
                creator = x._node._creator_node
                # Backward would go through another part's graph.
                if creator is not None and id(creator) not in self.numbers:
                    raise ValueError(
                        'it uses a variable of another layer or of an '
                        'earlier batch; hand it on from layer to layer, as '
                        'one of a tuple')
        if isinstance(node, BatchNormalization) and (
                node.running_mean is not None
                and chainer.config.in_recomputing):
            # The layer's, which may be anybody's arrays, have moved.
            node.running_mean, node.running_var = (
                node.running_mean.copy(), node.running_var.copy())
        if self._inside:        # of a function that calls others
            self._inner.update(parameters)
            return call_unchecked(node, inputs, original)
        key = (self._number, type(node), *[(x.shape, x.dtype)
                                           for x in inputs])
        if key not in self._checked:
            check_types(node, inputs)
            self._checked.add(key)
        self._inside = True
        try:
            outputs = call_unchecked(node, inputs, original)
        finally:
            self._inside = False
        self._uses.update(set(parameters))
        self.numbers[id(node)] = self._number
        self._number += 1
        self._names[id(node)] = self.now
        return outputs

    def said(self, function: Any) -> str:
        """The name of the layer that has called a function."""
        return self._names[id(function)]

    def final_uses(self) -> dict[Any, int]:
        """How often a parameter is used, if all its gradient comes so."""
        return {node: count for node, count in self._uses.items()
                if node not in self._inner}


# --- a second time -----------------------------------------------------------

#: How many numbers of an output are compared, and how near they must be.
_SAMPLE, _NEAR = 1024, 1e-3


class _Before:
    """Layers before a part was run, and some numbers of their outputs.

    Of links and objects that are layers: attributes, what lists and
    dictionaries among them hold, and states of random generators.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._owners = list({
            id(owner): owner for layer in layers
            for owner in _owners(layer)}.values())
        self._state = [_state(owner) for owner in self._owners]
        self._outputs: collections.deque[list[Any]] = collections.deque()

    def note(self, values: Sequence[chainer.Variable]) -> None:
        """Notes the outputs of the next layer."""
        self._outputs.append([_sample(value.array) for value in values])

    def compare(self, values: Sequence[chainer.Variable]) -> None:
        """Raises ValueError unless the next layer's outputs are as noted."""
        now = [_sample(value.array) for value in values]
        for one, other in zip(self._outputs.popleft(), now, strict=True):
            if one.shape != other.shape or not (
                    numpy.allclose(one, other, _NEAR, _NEAR * 1e-3 * float(
                        numpy.abs(one).max(initial=0)), equal_nan=True)
                    if one.dtype.kind in 'fc' else (one == other).all()):
                raise ValueError(
                    'it has given another result when it was run again, as '
                    'it draws or counts by itself; draw from NumPy\'s global '
                    "generator, or pass recompute='no stage'")

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A block with the layers as they were; then they are as now."""
        now = [_state(owner) for owner in self._owners]
        arrays = [(array, array.copy()) for owner in self._owners
                  for array in vars(owner).values()
                  if isinstance(array, chainer.get_array_types())]
        for owner, (attributes, inner) in zip(self._owners, self._state,
                                              strict=True):
            mine = vars(owner)
            # Not what was made in forward, such as parameters.
            mine.update({
                name: value for name, value in attributes.items()
                if isinstance(value, _PLAIN)
                and type(mine.get(name)) is type(value)})
            _refill(mine, inner)
        try:
            yield
        finally:
            for owner, (attributes, inner) in zip(self._owners, now,
                                                  strict=True):
                vars(owner).clear()
                vars(owner).update(attributes)
                _refill(attributes, inner)
            for array, values in arrays:
                if (array != values).any():
                    array[...] = values


def _owners(layer: Any) -> Iterator[Any]:
    """Objects with attributes that a layer may change."""
    if isinstance(layer, functools.partial):
        yield from _owners(layer.func)
    elif isinstance(layer, types.MethodType):
        yield from _owners(layer.__self__)
    elif isinstance(layer, chainer.Link):
        yield from layer.links()
    elif hasattr(layer, '__dict__') and not isinstance(
            layer, (type, types.FunctionType, types.ModuleType)):
        yield layer


#: What attributes are set back to, beside the inner state of others.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, numpy.generic,
          *chainer.get_array_types())
#: Attributes of Chainer's with names and children.
_STRUCTURE = frozenset(('_params', '_persistent', '_children', '_layers'))


def _state(owner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes, and what is inside of generators and containers."""
    inner: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if isinstance(value, numpy.random.RandomState):
            inner[name] = value.get_state()
        elif isinstance(value, numpy.random.Generator):
            inner[name] = value.bit_generator.state
        elif isinstance(value, random.Random):
            inner[name] = value.getstate()
        elif type(value) in (list, dict, set) and name not in _STRUCTURE:
            inner[name] = value.copy()
    return dict(vars(owner)), inner


def _refill(attributes: dict[str, Any], inner: dict[str, Any]) -> None:
    for name, kept in inner.items():
        value = attributes[name]
        if isinstance(value, numpy.random.RandomState):
            value.set_state(kept)
        elif isinstance(value, numpy.random.Generator):
            value.bit_generator.state = kept
        elif isinstance(value, random.Random):
            value.setstate(kept)
        elif type(value) is type(kept):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)


def _sample(array: Any) -> numpy.ndarray:
    flat = array.reshape(-1)
    return chainer.backends.cuda.to_cpu(
        flat[::max(1, flat.size // _SAMPLE)].copy())


# --- the loss ----------------------------------------------------------------

class LayersLoss:
    """The loss behind a list of layers, and metrics.

    Args:
        loss_func: ``loss_func(*outputs, target)``, a mean.
        metrics: Name to a function of the same arguments, a mean as well, or
            to a pair of such a function and its count.
        count: ``count(target)``: the weight of a micro-batch in the loss;
            None: its labels that are not ignored, or else its samples.

    Attributes:
        targets: Of the micro-batches of this step.
        metrics: Their names.
        found: For each micro-batch and metric its name, value and weight.
    """

    def __init__(self, loss_func: Callable, metrics: Mapping[str, Any],
                 count: Count | None) -> None:
        self._loss = loss_func, count or counting(loss_func)
        self._metrics = {
            name: metric if isinstance(metric, tuple)
            else (metric, counting(metric))
            for name, metric in metrics.items()}
        self.targets: list[Any] = []
        self.found: list[tuple[str, float, float]] = []

    def begin(self, targets: list[Any]) -> list[float]:
        """Starts a batch; the weight of each micro-batch in the loss."""
        self.targets, self.found = targets, []
        return [checked_weight(self._loss[1](target)) for target in targets]

    def __call__(self, micro_batch: int, outputs: tuple,
                 seeded: Callable) -> tuple[chainer.Variable]:
        """The loss of a micro-batch; notes the metrics.

        Raises:
            LayerError: The loss cannot be computed, or is no scalar.
        """
        target = self.targets[micro_batch]
        # With a graph, which shows the labels that are ignored.
        with blame('the loss', micro_batch), seeded(), \
                chainer.force_backprop_mode():
            loss = self._loss[0](*outputs, target)
            if not isinstance(loss, chainer.Variable):
                raise TypeError(f'loss_func returned a {type(loss).__name__}; '
                                'it must return a variable')
            _check('loss', loss, target, self._loss[1])
        # No metric changes what the loss has been given.
        arrays = [output.array for output in outputs]
        for name, (function, count) in self._metrics.items():
            with blame(f'metric {name!r}', micro_batch), seeded(), \
                    chainer.force_backprop_mode():
                value = function(*map(chainer.Variable, arrays), target)
                _check(name, value, target, count)
                weight = checked_weight(count(target))
                array = getattr(value, 'array', value)
                self.found.append((name, float(
                    array.item() if hasattr(array, 'item') else array
                ) if weight else 0.0, weight))
        return (loss,)


def _check(name: str, value: Any, target: Any, count: Count) -> None:
    if getattr(value, 'size', 1) != 1:
        raise ValueError(f'it returned shape {value.shape}; it must return a '
                         'scalar, the mean over a micro-batch')
    if count is samples and isinstance(value, chainer.Variable):
        refuse_hidden_labels(name, value, target)


def checked_weight(value: Any) -> float:
    """A micro-batch's weight as a float.

    Raises:
        ValueError: It is not one that a mean can have.
    """
    weight = float(getattr(value, 'array', value))
    if not 0 <= weight < math.inf:
        raise ValueError(f'the weight of a micro-batch is {weight}; '
                         'loss_weight must give finite numbers of at least 0')
    return weight


def counting(function: Callable) -> Count:
    """How much a loss or metric counts in a target, for its mean.

    Known from the arguments ``ignore_label`` and ``normalize`` of Chainer's
    functions, also when they were bound by :func:`functools.partial`.
    """
    bound: dict[str, Any] = {}
    inner = function
    while isinstance(inner, functools.partial):
        bound = {**inner.keywords, **bound}
        inner = inner.func
    try:
        known = inspect.signature(inner).parameters
    except (TypeError, ValueError):
        return samples
    values = {name: known[name].default for name in (
        'ignore_label', 'normalize') if name in known} | bound
    if inner is F.sigmoid_cross_entropy:
        values['ignore_label'] = -1     # built in
    label = values.get('ignore_label')
    if label is None or not values.get('normalize', True):
        return samples
    return functools.partial(_not_ignored, label)


def samples(target: Any) -> float:
    """The number of samples in a micro-batch's target."""
    return len(target)


def refuse_hidden_labels(name: str, value: chainer.Variable,
                         target: Any) -> None:
    """Refuses a mean over fewer than all samples that is weighted by samples.

    Args:
        name: ``'loss'``, or that of a metric.
        value: The mean of a micro-batch, with its graph.
        target: Of that micro-batch.

    Raises:
        ValueError: A function in the graph ignores a label that occurs; the
            message names the label and the remedy.
    """
    for function in _functions(value):
        label = getattr(function, 'ignore_label', None)
        if (label is not None and getattr(function, 'normalize', True)
                and bool((target == label).any())):
            weight = f'lambda t: (t != {label}).sum()'
            remedy = (f'loss_weight={weight}' if name == 'loss' else
                      f'metrics={{{name!r}: (function, {weight})}}')
            raise ValueError(
                f'label {label} occurs and is ignored inside of a function '
                f'that does not say how many count; pass {remedy}')


def _functions(loss: chainer.Variable) -> Iterator[Any]:
    """All functions in the graph of a loss."""
    waiting, seen = [loss.creator_node], set()
    while waiting:
        function = waiting.pop()
        if function is not None and id(function) not in seen:
            seen.add(id(function))
            yield getattr(function, 'function', function)   # old style
            waiting += [node.creator_node for node in function.inputs]


def _not_ignored(label: Any, target: Any) -> float:
    return float(numpy.count_nonzero(
        chainer.backends.cuda.to_cpu(target) != label))


# --- drawing -----------------------------------------------------------------

def _hooks_may_draw() -> bool:
    """Whether somebody's hooks see all layers."""
    return bool(chainer.get_function_hooks()) or not all([
        isinstance(hook, BatchStatistics)
        for hook in chainer._get_link_hooks().values()])


def _draws(layer: Any) -> bool:
    """Whether a layer may draw, itself or by a hook added just now."""
    if type(layer) in _STILL_LINKS:
        return bool(layer._local_link_hooks) or 'forward' in vars(layer)
    return not any([layer is function for function in _STILL_FUNCTIONS])
