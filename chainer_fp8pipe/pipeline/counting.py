"""How much of a micro-batch the mean of a loss or a metric is over.

Samples, or the labels that are not ignored.  Chainer's functions say which
by their arguments; a function that hides it is found by its graph.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainer.functions as F
import numpy

Count = Callable[[Any], float]


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


def samples(target: Any) -> float:
    """The number of samples in a micro-batch's target."""
    return len(target)


def refuse_hidden_labels(name: str, value: chainer.Variable,
                         target: Any) -> None:
    """A mean over fewer than all samples must not be taken for all.

    Args:
        name: ``'loss'``, or that of a metric.
        value: What the function returned for a micro-batch, with its graph.
        target: Of that micro-batch.

    Raises:
        ValueError: A function that it was computed by ignores a label that
            occurs; the message names the label and the remedy.
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
    """All functions that a loss was computed by."""
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
