"""Whether a model's loss is a mean over samples, as micro-batches need it."""
# A pipeline takes the mean of its micro-batches' losses.  That is the loss of
# the batch if that is a mean over samples, and not if it is a sum, or a mean
# over what the model itself counts.  So partition() compares: plain Chainer
# computes the loss of the example's first samples, and of the first and the
# others alone: two samples may have equally many labels, many hardly have.
# It does so as in evaluation, without dropout and batch statistics.  Weights
# matter little for this; those that are yet to be drawn are made up, as views
# of a few numbers, so that they take no memory.
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import (
    Interceptor,
    call_unchecked,
    intercepting,
)
from ..pipeline.randomness import preserved
from ..pipeline.stage import weights_of
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


def why_no_mean(model: Any, example: Any, names: Names) -> str:
    """A warning if the loss of samples is not the mean of theirs; or ''.

    Also '' where the model cannot be run so, or draws random numbers.
    """
    try:
        with _ready(names):
            samples, whole, mean = _compared(model, example)
    except Exception:       # what it takes to be run has been recorded
        return ''
    if whole == mean:
        return ''
    return (f'the loss of {samples} samples is {whole:.6g}, and the mean of '
            f'the loss of 1 and of {samples - 1} of them, by samples, is '
            f'{mean:.6g}: it is no mean over samples, and micro-batches give '
            'another gradient than one process. Train '
            'with --micro-batches 1 (micro_batches=1) and without replicas, '
            'or pass loss_weight= to PipelineUpdater')


def _compared(model: Any, example: Any) -> tuple[int, float, float]:
    """Samples, their loss, and the mean of its parts; equal if near."""
    args, kwargs = nested.arguments_of(example)
    every = [*args, *kwargs.values()]
    if len(every[0]) == 1:      # twice the same
        every = list(map(_twice, every))
    samples = min(len(every[0]), _SAMPLES)

    def loss(start: int, end: int) -> tuple[Any, list[tuple[int, int]]]:
        few = [one[start:end] for one in every]
        leaves, tree = nested.leaves((
            tuple(few[:len(args)]), dict(zip(kwargs, few[len(args):],
                                             strict=True))))
        given, named = nested.rebuilt(tree, [leaf.copy() for leaf in leaves])
        labels = _Labels()
        with intercepting(labels):
            return model(*given, **named).array, labels.found
    (whole, _), *parts = loss(0, samples), loss(0, 1), loss(1, samples)
    weights = weights_of([labels for _, labels in parts], [1, samples - 1])
    mean = float(sum(weight * float(part) for weight, (part, _) in zip(
        weights, parts, strict=True)) / sum(weights))

    def differ(one: float, other: float) -> bool:
        return math.isfinite(one - other) and abs(one - other) > 1e-6 + (
            _ROUNDING[whole.dtype.itemsize] * max(abs(one), abs(other)))
    if not differ(float(whole), mean) or differ(
            float(whole), float(loss(0, samples)[0])):
        return samples, mean, mean
    return samples, float(whole), mean


class _Labels(Interceptor):
    """Counts labels of losses: those in the mean, and those left out.

    Calls are made without Chainer's checks, which recording has done.
    """

    sees_links = False

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def apply(self, node: Any, inputs: Any, original: Any) -> Any:
        label = ignored_label(node)
        if label is not None:
            labels = nested.array_of(inputs[1])
            left = int((labels == label).sum())
            self.found.append((labels.size - left, left))
        return call_unchecked(node, inputs, original)


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
    """Small random numbers of a shape; many elements share one."""
    steps = [3, 5, 7, 1][-array.ndim:] if array.ndim else []
    steps = [1] * (array.ndim - len(steps)) + steps
    numbers = numpy.random.RandomState(0).uniform(-1, 1, 1 + sum(
        step * (length - 1) for step, length in zip(steps, array.shape,
                                                    strict=True)))
    numbers /= math.sqrt(max(array.size // max(array.shape[:1] + (1,)), 1))
    flat = array.xp.asarray(numbers.astype(array.dtype))
    return array.xp.lib.stride_tricks.as_strided(
        flat, array.shape, [step * array.itemsize for step in steps])


def _twice(value: Any) -> Any:
    return chainer.backend.get_array_module(value).concatenate(
        [value, value]) if hasattr(value, 'shape') else value + value
