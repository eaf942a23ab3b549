"""Goes through a forward pass without doing any of its calls.

The calls of a model may depend on the batch's values: on the shape of a tree,
on lengths of sequences, on random numbers.  So before a step every micro-batch
is rehearsed against the known traces, which takes some microseconds a call;
where none fits, the model is traced anew.

A rehearsal also counts the labels that losses leave out: micro-batches are
weighted by the number of the others, before the first backward pass.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from chainer import Variable
from chainer.function import FunctionAdapter

from . import nested
from .ghost import is_ghost
from .names import Names
from .tracing.traced_call import Replay, Trace, is_same


class Mismatch(Exception):
    """A forward pass makes other calls than the trace.

    The message says so where a constant is another one.
    """


class Rehearsal(Replay):
    """Compares the calls of a forward pass with those of a trace.

    Attributes:
        labels: For each loss that leaves labels out, how many labels count,
            and how many it leaves out.
    """

    def __init__(self, trace: Trace, names: Names) -> None:
        super().__init__(trace, names)
        self.labels: list[tuple[int, int]] = []

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here: no helpers are called
        # where all is as expected.
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
        for name, value in call.demands:
            found = own.get(name)
            if found is not value and not is_same(found, value):
                raise Mismatch(
                    f'call {number} ({call.name} in {call.link}) has {name} = '
                    f'{found!r:.40}, and had {value!r:.40}')
        if call.ignores is not None:
            label, index = call.ignores
            self.leave_out(None if index is None else inputs[index], label)
        if call.attributes:
            own.update(call.attributes)
        if call.error is not None:
            raise call.error.with_traceback(None)   # it holds the batch
        return call.ghosts

    def communicate(self, operation: Any, original: Callable) -> Any:
        return operation.answered(original, inside=False)

    def finish(self) -> None:
        """Raises Mismatch if calls of the trace were not made."""
        if self._number != len(self._calls):
            raise Mismatch

    def leave_out(self, labels: Any, label: int) -> None:
        """Counts labels: an array, a variable or None if unknown."""
        array = nested.array_of(labels)
        if array is None or is_ghost(array):
            self.labels.append((-1, 1))
        else:
            left = int((array == label).sum())
            self.labels.append((array.size - left, left))


def weights(labels: Sequence[Sequence[tuple[int, int]]],
            sizes: Sequence[int], replicas: int = 1) -> list[float]:
    """How much each micro-batch counts in the mean loss.

    That is its number of labels that count, if a loss may leave some out,
    else of samples.  A loss that leaves out none here may leave out some on
    other replicas, and weights are added over all replicas.

    Args:
        labels: Of each micro-batch, what a rehearsal has counted.
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


def _is_alike(array: Any, expected: Any) -> bool:
    """Whether an input matches what a trace expects, but for identity."""
    if is_ghost(array):
        return array.recipe is not None and (
            array.recipe.sources == expected and bool(expected))
    return type(expected) is tuple and len(expected) == 2 and (
        expected == (array.shape, array.dtype))
