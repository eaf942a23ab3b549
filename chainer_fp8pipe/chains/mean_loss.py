"""Whether a model's loss is a mean over samples, as micro-batches need it."""
# A pipeline takes the mean of its micro-batches' losses.  So the first update
# compares: plain Chainer computes the loss of the batch's first samples, and
# of the first and the others alone (two samples may have equally many labels,
# many hardly have), as in evaluation.  Weights of other ranks are made up, as
# views of a few numbers, which take no memory.
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import Interceptor, intercepting
from ..pipeline.means import weights_of
from ..pipeline.randomness import preserved
from . import nested
from .attributes import on_copies
from .deferred import place_array
from .functions import ignored_label
from .names import Names
from .placeholder import is_placeholder

#: How much the two may differ in rounding, by the bytes of the loss's dtype.
_ROUNDING = {2: 1e-2, 4: 1e-4, 8: 1e-7}
#: Samples that are compared.
_SAMPLES = 16


def why_no_mean(model: Callable, batches: Sequence[tuple[tuple, dict]],
                names: Names) -> str:
    """A warning if the loss of samples is not the mean of theirs; or ''.

    Also '' where the model cannot be run so, or draws random numbers.  It is
    called four times; what it changes outside of its links stays changed.
    ``batches`` are the arguments of the micro-batches, by place and by name.
    """
    args, kwargs = batches[0]
    every = [_joined(parts) for parts in zip(*(
        (*one, *named.values()) for one, named in batches), strict=True)]

    def loss(rows: list[int]) -> tuple[Any, list[tuple[int, int]]]:
        few = [[one[row] for row in rows] if isinstance(one, (list, tuple))
               else one[rows] for one in every]     # copies
        labels = _Labels()
        with intercepting(labels):
            return model(*few[:len(args)], **dict(zip(
                kwargs, few[len(args):], strict=True))).array, labels.found
    try:
        # Of one sample: twice the same.
        first, *others = range(min(len(every[0]), _SAMPLES))
        others = others or [first]
        with _ready(names):
            (whole, _), *parts, (again, _) = map(loss, (
                [first, *others], [first], others, [first, *others]))
        weights = weights_of([labels for _, labels in parts],
                             [1, len(others)])
        mean = sum(weight * float(part) for weight, (part, _) in zip(
            weights, parts, strict=True)) / sum(weights)
    except Exception:       # what it takes to be run has been recorded
        return ''
    is_mean, is_same = (math.isclose(
        whole, one, abs_tol=1e-6, rel_tol=_ROUNDING[whole.dtype.itemsize])
        for one in (mean, float(again)))
    if is_mean or not is_same or not math.isfinite(whole - mean):
        return ''
    return (f'the loss of {len(others) + 1} samples is {whole:.6g}, and the '
            f'mean of the loss of 1 and of {len(others)} of them, by samples, '
            f'is {mean:.6g}: it is no mean over samples, and micro-batches '
            'give another gradient than one process. Train '
            'with --micro-batches 1 (micro_batches=1) and without replicas, '
            'or pass loss_weight= to PipelineUpdater')


def _joined(parts: Sequence[Any]) -> Any:
    """An argument of all micro-batches: an array, or a list of samples."""
    if hasattr(parts[0], 'shape'):
        return chainer.backend.get_array_module(parts[0]).concatenate(parts)
    return [sample for part in parts for sample in part]


class _Labels(Interceptor):
    """Counts labels of losses: those in the mean, and those left out."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def apply(self, node: Any, inputs: Any, original: Any) -> Any:
        label = ignored_label(node)
        if label is not None:
            self.leave_out(inputs[1], label)
        return original(node, inputs)

    def leave_out(self, labels: Any, label: int) -> None:
        labels = nested.array_of(labels)
        left = int((labels == label).sum())
        self.found.append((labels.size - left, left))


@contextlib.contextmanager
def _ready(names: Names) -> Iterator[None]:
    """A block in which all parameters have values, and links may be called."""
    before = [(one, one._data[0]) for one in names.parameters.values()]
    with preserved(), on_copies(names.links), names.reporter.scope({}), \
            chainer.using_config('train', False), chainer.no_backprop_mode():
        for parameter, array in before:
            if is_placeholder(array):
                place_array(parameter, _made_up(array))
        try:
            yield
        finally:
            for parameter, array in before:
                place_array(parameter, array)


def _made_up(array: Any) -> Any:
    """Small random numbers of a shape, one for each row of the first axis."""
    rows = numpy.random.RandomState(0).uniform(-1, 1, (
        *array.shape[:1], *[1] * (array.ndim - 1)))
    rows /= math.sqrt(max(array.size // max(array.shape[:1] + (1,)), 1))
    return array.xp.broadcast_to(
        array.xp.asarray(rows.astype(array.dtype)), array.shape)
