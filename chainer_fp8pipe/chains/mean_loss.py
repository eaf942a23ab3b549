"""Whether a model's loss is a mean over samples, as micro-batches need it."""
# A pipeline takes the mean of its micro-batches' losses.  So the first update
# compares: plain Chainer computes the loss of the batch's first samples, and
# of the first and the others alone (two samples may have equally many labels,
# many hardly have), as in evaluation.  Where it draws random numbers, halves
# are compared, often enough to tell a sum from a mean.  Weights of other ranks
# are made up, as views of a few numbers, which take no memory.
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import intercepting
from ..pipeline.means import weights_of
from ..pipeline.randomness import preserved
from . import nested
from .attributes import Names, State, on_copies
from .collectives import Answering
from .deferred import place_array
from .measure import SeesLabels, counted
from .placeholder import is_placeholder
from .recorder import NOWHERE, seed_between

#: How much the two may differ in rounding, by the bytes of the loss's dtype.
_ROUNDING = {2: 1e-2, 4: 3e-5, 8: 1e-7}
#: Samples that are compared.
_SAMPLES = 16
_MOVES = (
    'the loss of {} samples is {:.6g} in one call and {:.6g} in the next: '
    'what forward keeps (an average, a count in an object, a generator) '
    'moves with each micro-batch, and not once a batch. Train with '
    '--micro-batches 1 (micro_batches=1), or count batches in an attribute of '
    'a link')
#: Draws that are compared, where there are random numbers; in how many errors
#: of their mean, and in what share of the loss, a sum is told by then.
_DRAWS, _ERRORS, _SHARE = 8, 6.0, 0.1


def why_no_mean(model: Callable, args: Sequence[Any], kwargs: dict[str, Any],
                names: Names, state: State) -> str:
    """A warning if the loss of samples is not the mean of theirs; or ''.

    Or if that of the same samples moves on with each call.  Also '' where the
    model cannot be run so.  It is called eight times, 24 times more where it
    draws; what it changes in objects outside of its links stays changed.
    """
    every = [*args, *kwargs.values()]

    def loss(rows: list[int]) -> tuple[Any, list[tuple[int, int]]]:
        few, named = nested.taken((args, kwargs), rows)
        labels = _Labels()
        state.put_back()
        with intercepting(labels):
            return model(*few, **named).array, labels.found

    def both(count: int) -> tuple[float, float]:
        """The loss, and the mean of the first ones' and the others'."""
        parts = [loss(part) for part in (rows[:count], rows[count:])]
        weights, _ = weights_of([labels for _, labels in parts],
                                [count, len(rows) - count])
        return float(loss(rows)[0]), sum(weight * float(part) for weight, (
            part, _) in zip(weights, parts, strict=True)) / sum(weights)

    def again() -> Any:
        """The loss in training, always with the same random numbers."""
        seed_between(NOWHERE)
        with chainer.using_config('train', True):
            return loss(rows)[0]

    def is_apart(one: float, other: float, tolerance: float = 0.) -> bool:
        return math.isfinite(one - other) and not math.isclose(
            one, other, abs_tol=max(tolerance, 1e-6),
            rel_tol=_ROUNDING[dtype.itemsize])
    # Of one sample: twice the same.
    rows = _rows(every) * (1 + (len(every[0]) == 1))
    half = len(rows) // 2
    try:
        with _ready(names, model):
            whole, later = again(), again()
            dtype = whole.dtype
            if is_apart(whole, later):
                return _MOVES.format(len(rows), float(whole), float(later))
            tried = {count: [both(count)] for count in (half, 1)}
            if is_apart(tried[half][0][0], tried[1][0][0]):
                tried = {half: [both(half) for _ in range(_DRAWS)]}
    except Exception:       # what it takes to be run has been recorded
        return ''
    for count, drawn in tried.items():
        whole, mean = numpy.mean(drawn, axis=0)
        error = numpy.std(numpy.diff(drawn)) / math.sqrt(_DRAWS - 1)
        if is_apart(whole, mean, 0. if len(drawn) == 1 else max(
                _ERRORS * error, _SHARE * abs(whole))):
            return (
                f'the loss of {len(rows)} samples is {whole:.6g}, and the '
                f'mean of the loss of {count} and of {len(rows) - count} of '
                f'them, by samples, is {mean:.6g}: it is no mean over samples,'
                ' and micro-batches give another gradient than one process. '
                'Train with --micro-batches 1 (micro_batches=1) and without '
                'replicas, or pass loss_weight= to PipelineUpdater')
    return ''


def _rows(every: Sequence[Any]) -> list[int]:
    """Some samples, of which those with labels that may not count are first.
    """
    left = numpy.zeros(len(every[0]), bool)
    for array in every:
        if getattr(array, 'dtype', left.dtype).kind == 'i':
            host = chainer.backends.cuda.to_cpu(array)
            left |= (host < 0).reshape(len(left), -1).any(axis=1)
    return numpy.argsort(~left, kind='stable')[:_SAMPLES].tolist()


class _Labels(SeesLabels, Answering):
    """Counts labels of losses."""

    # It knows no pipeline: another replica may not compare its batch.
    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def leave_out(self, labels: Any, label: int) -> None:
        self.found.append(counted(labels, label))


@contextlib.contextmanager
def _ready(names: Names, function: Callable) -> Iterator[None]:
    """A block in which all parameters have values, and links may be called."""
    before = [(one, one._data[0]) for one in names.parameters.values()]
    with preserved(), on_copies(names.links, function), \
            names.reporter.scope({}), chainer.no_backprop_mode(), \
            chainer.using_config('train', False):
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
