"""How much each micro-batch of a partitioned Chain counts in the mean.

A loss that ignores labels is a mean over those that it does not ignore.  How
many these are must be known before the first backward pass, so the model's
forward is run once without any calls where such a loss is in its trace, and
the labels that it is given are counted.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import intercepting
from . import nested
from .ghost import is_ghost
from .program import Program, counted_labels
from .trace import attributes_of, reporter_of
from .whole import LinkCall, call_whole


def count_labels(partition: Any, calls: list[Callable],
                 programs: list[Program], sizes: list[int]) -> list[float]:
    """Weights of the micro-batches.

    Args:
        partition: Of the model.
        calls: Call the model with each micro-batch.
        programs: One per micro-batch.
        sizes: Samples of each.

    Raises:
        ValueError: Several losses leave out labels, and not equally many.
    """
    samples = [float(size) for size in sizes]
    ignored = {label for program in programs
               for label in counted_labels(program.trace)}
    if len(sizes) == 1 or not any(
            _occurs(label, call) for label in ignored for call in calls):
        return samples
    counts = []
    for call, program in zip(calls, programs, strict=True):
        counter = _Counter(partition, program)
        with partition.passes.untouched(program), \
                reporter_of(partition.names), intercepting(counter):
            call()
        counts.append(counter.counts)
    if not any(left for several in counts for _, left in several):
        return samples
    totals = [[float(count) for count, _ in several] for several in counts]
    if len({len(several) for several in totals}) == 1:
        table = numpy.array(totals)
        shares = table / numpy.maximum(table.sum(0), 1)
        if (abs(shares - shares[:, :1]) < 1e-12).all():
            return [float(count) for count in table[:, 0]]
    raise ValueError(
        'several losses of the model ignore labels, and not equally many of '
        'each micro-batch, so that no weights of micro-batches give the '
        'loss of the whole batch; pass loss_weight=, a function of the batch')


def _occurs(label: int, call: Any) -> bool:
    """Whether some labels of a micro-batch may be this one."""
    return any(bool((nested.array_of(leaf) == label).any())
               for leaf in nested.leaves((call.args, call.keywords))[0]
               if nested.array_of(leaf).dtype.kind in 'iu')


class _Counter:
    """Does no call; counts the labels that losses are given.

    Attributes:
        counts: For each such call how many labels count, and how many are
            left out.
    """

    inside = False

    def __init__(self, partition: Any, program: Program) -> None:
        self.counts: list[tuple[int, int]] = []
        self._names = partition.names
        self._trace = program.trace
        self._number = program.trace.first

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        if self._names.of(link) in self._trace.atomic:
            return self.call_whole(LinkCall(link, original), args, kwargs)
        return original(link, *args, **kwargs)

    def call_whole(self, function: Any, args: Any, kwargs: Any) -> Any:
        return call_whole(
            function, args, kwargs,
            lambda node: self._trace.calls[self._number - 1].form)

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        call = self._trace.calls[self._number]
        self._number += 1
        if call.ignores is not None:
            self._count(node, inputs)
        if call.error is not None:
            raise call.error
        attributes_of(node).update(call.attributes)
        return call.ghosts

    def _count(self, node: Any, inputs: tuple) -> None:
        function = getattr(node, 'function', node)
        labels = nested.array_of(inputs[1])
        if is_ghost(labels):
            raise ValueError(
                f'{node.label} ignores labels that the model computes itself, '
                'so that nobody knows before how many count; pass '
                'loss_weight=, a function of the batch')
        ignored = int((labels == function.ignore_label).sum())
        self.counts.append((labels.size - ignored, ignored))
