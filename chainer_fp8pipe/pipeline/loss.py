"""The loss of a batch from the losses of its micro-batches.

A mean over a batch is not the mean of its micro-batches' means where one is
shorter or labels are ignored.  So each micro-batch is weighted by its number
of samples, or of labels that are not ignored.  The arguments of Chainer's
functions say which; a function that ignores labels without such an argument is
found in the loss's graph.  Of a Chain that returns its loss the labels are
counted before the step, by a rehearsal.
"""
from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy

from .backprop import Arrays
from .layers import blame

Count = Callable[[Any], float]


class MeanLoss:
    """The mean of the losses of micro-batches, and where backward begins.

    The last chunk's output is the loss of a micro-batch, itself a mean.

    Attributes:
        sum: Of losses times their weights.
        weight: The sum of these weights.
    """

    sum = weight = 0.0

    def begin(self, weights: list[float], total: float,
              loss_scale: float | None) -> None:
        """Starts a batch.

        Args:
            weights: Of the micro-batches.
            total: Sum of all weights in the mean, of other replicas too.
            loss_scale: Factor of all gradients; None for 1.
        """
        self._weights, self._total = weights, total or 1.0
        self._scale = 1.0 if loss_scale is None else loss_scale
        self._losses: dict[int, Any] = {}
        self.sum = self.weight = 0.0

    def forward(self, micro_batch: int, outputs: Arrays) -> None:
        """Takes the loss of a micro-batch."""
        loss, = outputs
        self._losses[micro_batch] = loss
        weight = self._weights[micro_batch]
        if weight:      # or it may be NaN
            self.sum += weight * float(loss.item())
            self.weight += weight

    def backward(self, micro_batch: int) -> Arrays:
        """The gradient of the loss of a micro-batch."""
        loss = self._losses.pop(micro_batch)
        xp = chainer.backend.get_array_module(loss)
        return (xp.full_like(loss, self._weights[micro_batch] / self._total
                             * self._scale),)


class LayersLoss:
    """The loss behind a list of layers, and metrics.

    Args:
        loss_fun: ``loss_fun(*outputs, target)``, a mean.
        metrics: Name to a function of the same arguments, a mean as well, or
            to a pair of such a function and its count.
        count: ``count(target)``: the weight of a micro-batch in the loss;
            None: its labels that are not ignored, or else its samples.

    Attributes:
        targets: Of the micro-batches of this step.
        metrics: Their names.
        found: For each micro-batch and metric its name, value and weight.
    """

    def __init__(self, loss_fun: Callable, metrics: Mapping[str, Any],
                 count: Count | None) -> None:
        self._loss = loss_fun, count or counting(loss_fun)
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
                raise TypeError(f'loss_fun returned a {type(loss).__name__}; '
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


def weights_of(labels: Sequence[Sequence[tuple[int, int]]],
               sizes: Sequence[int], replicas: int = 1) -> list[float]:
    """How much each micro-batch counts in the mean loss.

    That is its number of labels that count, if a loss may leave some out,
    else of samples.  A loss that leaves out none here may leave out some on
    other replicas, and weights are added over all replicas.

    Args:
        labels: Of each micro-batch, for each loss that may leave out labels:
            how many count (-1: unknown), and how many are left out.
        sizes: Samples of each micro-batch.
        replicas: Number of replicas, each with a batch of its own.

    Raises:
        ValueError: Several losses leave out labels, and not equally many.
    """
    samples = [float(size) for size in sizes]
    every = [one for several in labels for one in several]
    if not every or len(sizes) == replicas == 1:
        return samples
    if any(count < 0 for count, _ in every):
        raise ValueError(
            'a loss ignores some of the labels that the model computes '
            'itself, so that nobody knows before how many count; pass '
            'loss_weight=, a function of the batch, to PipelineUpdater')
    leaves_out = any(left for _, left in every)
    if len({len(several) for several in labels}) == 1:
        table = numpy.array([[float(count) for count, _ in several]
                             for several in labels])
        shares = table / numpy.maximum(table.sum(0), 1)
        # No replica knows the others' shares, so numbers must be equal.
        if (abs(shares - shares[:, :1]) < 1e-12).all() and (
                replicas == 1 or not leaves_out
                or (table == table[:, :1]).all()):
            return [float(count) for count in table[:, 0]]
    if not leaves_out:
        return samples
    raise ValueError(
        'several losses of the model ignore labels, and not equally many of '
        'each micro-batch, so that no weights of micro-batches give the loss '
        'of the whole batch; pass loss_weight=, a function of the batch, to '
        'PipelineUpdater')


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
