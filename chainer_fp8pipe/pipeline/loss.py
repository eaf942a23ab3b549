"""The loss of a batch from the losses of its micro-batches.

A mean over a batch is not the mean of its micro-batches' means where one is
shorter or labels are ignored.  So each micro-batch is weighted by its number
of samples, or of labels that are not ignored.  The arguments of Chainer's
functions say which; a function that ignores labels without such an argument is
found in the loss's graph.
"""
from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import chainer.functions as F
import numpy

from .block import Arrays
from .layers import blame
from .randomness import Place, at

Count = Callable[[Any], float]


class LossHead:
    """Loss and metrics behind the last layer, and the loss's gradients.

    Args:
        loss_fun: ``loss_fun(*outputs, target)``, a mean.
        metrics: Name to a function of the same arguments, a mean as well, or
            to a pair of such a function and its count.
        count: ``count(target)``: the weight of a micro-batch in the loss;
            None: its labels that are not ignored, or else its samples.
    """

    def __init__(self, loss_fun: Callable, metrics: Mapping[str, Any],
                 count: Count | None) -> None:
        self._functions = {'loss': loss_fun}
        self._counts = {'loss': count or counting(loss_fun)}
        for name, metric in metrics.items():
            function, weight = (metric if isinstance(metric, tuple)
                                else (metric, counting(metric)))
            self._functions[name], self._counts[name] = function, weight
        self._losses: dict[int, tuple[chainer.Variable, tuple]] = {}
        self.begin([], [], 1.0, None)

    @property
    def names(self) -> tuple[str, ...]:
        """``'loss'`` and the metrics."""
        return tuple(self._functions)

    def count(self, targets: list[Any]) -> list[float]:
        """The weight of each micro-batch in the loss."""
        return [checked_weight(self._counts['loss'](target))
                for target in targets]

    def begin(self, targets: list[Any], weights: list[float],
              total: float, loss_scale: float | None) -> None:
        """Starts a batch.

        Args:
            targets: One per micro-batch.
            weights: As :meth:`count` returned.
            total: Sum of all weights in the mean, of other replicas too.
            loss_scale: Factor of all gradients; None for 1.
        """
        self._targets = targets
        self._shares = [weight / total if total else 0.0
                        for weight in weights]
        self._scale = 1.0 if loss_scale is None else loss_scale
        self._losses.clear()
        self.sums = dict.fromkeys(self._functions, 0.0)
        self.totals = dict.fromkeys(self._functions, 0.0)

    def forward(self, micro_batch: int, arrays: Arrays,
                place: Place) -> None:
        """Computes loss and metrics from the last layer's outputs.

        Raises:
            LayerError: The loss cannot be computed, or is no scalar.
        """
        target = self._targets[micro_batch]
        train = chainer.config.enable_backprop
        xp = chainer.backend.get_array_module(*arrays)
        for name in self._functions:
            what = 'the loss' if name == 'loss' else f'metric {name!r}'
            with blame(what, micro_batch), at(place, xp):
                inputs = tuple(chainer.Variable(
                    array, requires_grad=array.dtype.kind == 'f')
                    for array in arrays)
                # With a graph, which shows the labels that are ignored.
                with chainer.force_backprop_mode():
                    value = self._functions[name](*inputs, target)
                self._check(name, value, target)
                self._note(name, value, target)
            if name == 'loss' and train:
                self._losses[micro_batch] = value, inputs

    def backward(self, micro_batch: int) -> Arrays:
        """Gradients of the last layer's outputs."""
        loss, inputs = self._losses.pop(micro_batch)
        share = self._shares[micro_batch] * self._scale
        with blame('the backward pass of the loss', micro_batch):
            loss.grad = loss.xp.full_like(loss.array, share)
            loss.backward()
        return tuple(variable.grad for variable in inputs)

    def _note(self, name: str, value: Any, target: Any) -> None:
        weight = checked_weight(self._counts[name](target))
        if weight:
            array = getattr(value, 'array', value)
            number = float(array.item() if hasattr(array, 'item') else array)
            self.sums[name] += weight * number
            self.totals[name] += weight

    def _check(self, name: str, value: Any, target: Any) -> None:
        if name == 'loss' and not isinstance(value, chainer.Variable):
            raise TypeError(f'loss_fun returned a {type(value).__name__}; it '
                            'must return a variable')
        if getattr(value, 'size', 1) != 1:
            raise ValueError(f'it returned shape {value.shape}; it must '
                             'return a scalar, the mean over a micro-batch')
        if (self._counts[name] is samples
                and isinstance(value, chainer.Variable)):
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
