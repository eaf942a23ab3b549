"""The loss of a batch from the losses of its micro-batches.

A mean over a batch is not the mean of the means of its parts where these
differ in what they count: the last micro-batch may be shorter, and labels may
be ignored.  So each part is weighted by its share of what is counted.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer

from .counting import Count, counting, refuse_hidden_labels, samples
from .layers import blame
from .randomness import Place, at
from .tape import Arrays


class LossHead:
    """What follows the last layer: loss, metrics, and their gradients.

    Args:
        loss_fun: ``loss_fun(*outputs, target)``, a mean over what it counts.
        metrics: Name to a function of the same arguments, a mean as well, or
            to a pair of such a function and its count.
        count: ``count(target)``: how much a micro-batch counts for in the
            loss; None: the labels that the function does not ignore, or else
            samples.
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

    def forward(self, micro_batch: int, arrays: Arrays,
                place: Place) -> None:
        """Loss and metrics of one micro-batch.

        Args:
            micro_batch: Its number.
            arrays: The last layer's outputs.
            place: Where we are, for what the loss draws.

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
                # With a graph, in which one sees what is ignored.
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
        weight = float(self._counts[name](target))
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
