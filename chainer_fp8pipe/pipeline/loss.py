"""The loss of a batch from the losses of its micro-batches.

A mean over a batch is not the mean of the means of its parts where these
differ in what they count: the last micro-batch may be shorter, and labels may
be ignored.  So each part is weighted by its share of what is counted.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import chainer.functions as F
import numpy

from .layers import blame
from .tape import Arrays

Count = Callable[[Any], float]


class LossHead:
    """What follows the last layer: loss, metrics, and their gradients.

    Args:
        loss_fun: ``loss_fun(*outputs, target)``, a mean over what it counts.
        metrics: Name to function of the same arguments; means as well.
        count: ``count(target)``: how much a micro-batch counts for; None:
            the labels that the function does not ignore, or else samples.
    """

    def __init__(self, loss_fun: Callable,
                 metrics: Mapping[str, Callable], count: Count | None) -> None:
        self._functions = {'loss': loss_fun, **metrics}
        self._counts = {name: count or counting(function)
                        for name, function in self._functions.items()}
        self._guess = count is None
        self._losses: dict[int, tuple[chainer.Variable, tuple]] = {}
        self.begin([], [], 1.0, None)

    @property
    def names(self) -> tuple[str, ...]:
        """``'loss'`` and the metrics."""
        return tuple(self._functions)

    def count(self, targets: list[Any]) -> list[float]:
        """How much of a batch ``loss_fun`` counts, per micro-batch."""
        return [float(self._counts['loss'](target)) for target in targets]

    def begin(self, targets: list[Any], weights: list[float],
              total: float, loss_scale: float | None) -> None:
        """Starts a batch.

        Args:
            targets: One per micro-batch.
            weights: What :meth:`count` gave.
            total: Sum of the weights that the mean is over.
            loss_scale: Factor of all gradients; None for 1.
        """
        self._targets = targets
        self._shares = [weight / total if total else 0.0
                        for weight in weights]
        self._scale = 1.0 if loss_scale is None else loss_scale
        self._losses.clear()
        self.sums = dict.fromkeys(self._functions, 0.0)
        self.totals = dict.fromkeys(self._functions, 0.0)

    def forward(self, micro_batch: int, arrays: Arrays) -> None:
        """Loss and metrics of one micro-batch.

        Raises:
            LayerError: The loss cannot be computed, or is no scalar.
        """
        target = self._targets[micro_batch]
        inputs = tuple(
            chainer.Variable(array, requires_grad=array.dtype.kind == 'f')
            for array in arrays)
        with blame('the loss', micro_batch):
            loss = self._functions['loss'](*inputs, target)
            self._check(loss, target)
        if chainer.config.enable_backprop:
            self._losses[micro_batch] = loss, inputs
        self._note('loss', loss, target)
        with chainer.no_backprop_mode():
            for name, function in self._functions.items():
                if name != 'loss':
                    with blame(f'metric {name!r}', micro_batch):
                        self._note(name, function(*inputs, target), target)

    def backward(self, micro_batch: int) -> Arrays:
        """Gradients of the last layer's outputs."""
        loss, inputs = self._losses.pop(micro_batch)
        share = self._shares[micro_batch] * self._scale
        with blame('the backward pass of the loss', micro_batch):
            loss.grad = loss.xp.full_like(loss.array, share)
            loss.backward()
        return tuple(variable.grad for variable in inputs)

    def _note(self, name: str, value: Any, target: Any) -> None:
        weight = float(self._counts[name](target))
        if weight:
            number = float(getattr(value, 'array', value))
            self.sums[name] += weight * number
            self.totals[name] += weight

    def _check(self, loss: Any, target: Any) -> None:
        if not isinstance(loss, chainer.Variable):
            raise TypeError(f'loss_fun returned a {type(loss).__name__}; it '
                            'must return a variable')
        if loss.size != 1:
            raise ValueError(f'loss_fun returned shape {loss.shape}; it must '
                             'return a scalar, the mean over a micro-batch')
        if not self._guess:
            return
        for function in _functions(loss):
            label = getattr(function, 'ignore_label', None)
            if (label is not None and getattr(function, 'normalize', False)
                    and self._counts['loss'] is samples
                    and bool((target == label).any())):
                raise ValueError(
                    f'loss_fun ignores label {label}, which occurs, inside '
                    'of a function that hides how many count; pass '
                    f'loss_weight=lambda t: (t != {label}).sum()')


def counting(function: Callable) -> Count:
    """What a loss or metric takes its mean over, as a function of targets.

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


def _functions(loss: chainer.Variable) -> Iterator[Any]:
    """All functions that a loss was computed by."""
    waiting, seen = [loss.creator_node], set()
    while waiting:
        function = waiting.pop()
        if function is not None and id(function) not in seen:
            seen.add(id(function))
            yield function
            waiting += [node.creator_node for node in function.inputs]


def samples(target: Any) -> float:
    """The number of samples in a micro-batch's target."""
    return len(target)


def _not_ignored(label: Any, target: Any) -> float:
    return float(numpy.count_nonzero(
        chainer.backends.cuda.to_cpu(target) != label))
