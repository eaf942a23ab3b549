"""Goes through a forward pass without doing any of its calls.

What a model calls may depend on the batch's values: on the shape of a tree,
on lengths of sequences, on a tossed coin.  So before a step every micro-batch
is rehearsed against the traces there are, which takes some microseconds a
call; where none fits, the model is traced anew.

Labels that a loss leaves out are counted on the way.  How many count must be
known before the first backward pass, as micro-batches are weighted by it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer
import numpy
from chainer import Variable
from chainer.function import FunctionAdapter

from . import nested
from .ghost import is_ghost
from .names import Names
from .trace import Trace
from .traced_call import is_same
from .whole import LinkCall, call_whole


class Mismatch(Exception):
    """A forward pass makes other calls than the trace."""


class Rehearsal:
    """Compares the calls of a forward pass with those of a trace.

    Args:
        trace: Of some forward pass.
        names: Of the model's links and parameters.

    Attributes:
        labels: For each loss that leaves labels out, how many labels count,
            and how many it leaves out.
    """

    inside = False

    def __init__(self, trace: Trace, names: Names) -> None:
        self.labels: list[tuple[int, int]] = []
        self._names, self._trace = names, trace
        self._calls = trace.calls
        self._number = trace.first

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        if self._trace.atomic and self._names.of(link) in self._trace.atomic:
            return self.call_whole(LinkCall(link, original), args, kwargs)
        return original(link, *args, **kwargs)

    def before_backward(self, outputs: Any) -> None:
        """Allows it: tracing has refused gradients of ghosts."""

    def call_whole(self, function: Any, args: Any, kwargs: Any) -> Any:
        return call_whole(function, args, kwargs,
                          lambda node: self._calls[self._number - 1].form)

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Comes for every call of every micro-batch: no helpers where all is
        # as expected.
        number = self._number
        if number >= len(self._calls):
            raise Mismatch
        call = self._calls[number]
        self._number = number + 1
        function = node.function if type(node) is FunctionAdapter else node
        if (type(function) is not call.kind
                or len(inputs) != len(call.expected)):
            raise Mismatch
        for x, expected in zip(inputs, call.expected, strict=False):
            array = x._data[0] if isinstance(x, Variable) else x
            if array is not expected and x is not expected and (
                    not _is_alike(array, expected)):
                raise Mismatch
        own = function.__dict__
        for name, value in call.constants:
            found = own.get(name)
            if found is not value and not is_same(found, value):
                raise Mismatch
        if call.ignores is not None:
            self._count(node, inputs)
        if call.attributes:
            own.update(call.attributes)
        if call.error is not None:
            raise call.error
        return call.ghosts

    def finish(self) -> None:
        """Raises an error if calls of the trace were not made."""
        if self._number != len(self._calls):
            raise Mismatch

    def _count(self, node: Any, inputs: tuple) -> None:
        function = getattr(node, 'function', node)
        labels = nested.array_of(inputs[1])
        if is_ghost(labels):
            self.labels.append((-1, 1))     # nobody knows
        else:
            left = int((labels == function.ignore_label).sum())
            self.labels.append((labels.size - left, left))


def weights(labels: Sequence[Sequence[tuple[int, int]]],
            sizes: Sequence[int]) -> list[float]:
    """How much each micro-batch counts in the mean loss.

    Args:
        labels: Of each micro-batch, what a rehearsal has counted.
        sizes: Samples of each micro-batch.

    Raises:
        ValueError: Several losses leave out labels, and not equally many.
    """
    samples = [float(size) for size in sizes]
    if len(sizes) == 1 or not any(
            left for several in labels for _, left in several):
        return samples
    if any(count < 0 for several in labels for count, _ in several):
        raise ValueError(
            'a loss ignores some of the labels that the model computes '
            'itself, so that nobody knows before how many count; pass '
            'loss_weight=, a function of the batch, to PipelineUpdater')
    if len({len(several) for several in labels}) == 1:
        table = numpy.array([[float(count) for count, _ in several]
                             for several in labels])
        shares = table / numpy.maximum(table.sum(0), 1)
        if (abs(shares - shares[:, :1]) < 1e-12).all():
            return [float(count) for count in table[:, 0]]
    raise ValueError(
        'several losses of the model ignore labels, and not equally many of '
        'each micro-batch, so that no weights of micro-batches give the loss '
        'of the whole batch; pass loss_weight=, a function of the batch, to '
        'PipelineUpdater')


def _is_alike(array: Any, expected: Any) -> bool:
    """Whether an input that is another object is what the trace had."""
    if is_ghost(array):
        return array.recipe is not None and (
            array.recipe.sources == expected and bool(expected))
    return type(expected) is tuple and len(expected) == 2 and (
        expected == (array.shape, array.dtype))
