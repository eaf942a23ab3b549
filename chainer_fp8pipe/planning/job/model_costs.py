"""A model's seconds and bytes for any number of samples.

Both are taken to grow along a line through the two sizes that were measured:
a part is the same for any batch (calls of functions, gradients of weights'
own arrays), the rest grows with the samples.
"""
from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy

from ..partition.intervals import Intervals
from .job_profile import ModelFigures

_SUMS = 'forward', 'backward', 'weights'
_BYTES = 'kept', 'deferred', 'temporary', 'plain', 'crossing'


class Pass(NamedTuple):
    """Seconds of each call, float64[calls]."""

    forward: numpy.ndarray
    backward: numpy.ndarray

    @property
    def seconds(self) -> float:
        """Of all calls together."""
        return float(self.forward.sum() + self.backward.sum())


class ModelCosts:
    """Seconds and bytes of a model for any number of samples.

    Args:
        figures: What was measured.
    """

    def __init__(self, figures: ModelFigures) -> None:
        self.figures = figures
        self.plain = functools.lru_cache(64)(self._plain)
        self.intervals = functools.lru_cache(16)(self._intervals)

    def _plain(self, samples: float) -> Pass:
        """Seconds of the calls by plain Chainer, with so many samples."""
        one = self.figures
        forward, backward = (
            max(self._line(large, small, samples), 0.5 * large * min(
                samples / one.samples, 1.0))
            for large, small in zip(one.plain, one.plain_few, strict=True))
        # Which call takes which share of them.
        laps = numpy.array([(call.forward, call.backward)
                            for call in one.calls]).T
        sums = numpy.maximum(laps.sum(axis=1), 1e-12)
        return Pass(*(laps * numpy.array([[forward], [backward]])
                      / sums[:, None]))

    def _intervals(self, samples: float) -> Intervals:
        """All intervals of the calls, with so many samples."""
        large, small = self._both
        found = copy.copy(large)
        for name in (*_SUMS, *_BYTES):
            one, other = getattr(large, name), getattr(small, name)
            if one.shape != other.shape:
                other = one * (self.figures.few / self.figures.samples)
            line = self._line(one, other, samples)
            if name in _SUMS:       # of which no call's part is negative
                line = numpy.maximum(numpy.diff(line, prepend=0.0),
                                     0.0).cumsum()
            setattr(found, name, numpy.maximum(line, 0.0))
        found.weights = numpy.minimum(
            numpy.diff(found.weights, prepend=0.0),
            numpy.diff(found.backward, prepend=0.0)).cumsum()
        # Holes that a micro-batch leaves in the heap, the next one fills.
        last = found.count
        found.plain = found.plain + self.figures.heap * (
            found.kept[0, last] + found.plain)
        found.temporary = found.temporary + self.figures.heap * (
            found.kept + found.temporary)
        found.update_times = self.figures.update_temporary
        return found

    @functools.cached_property
    def _both(self) -> tuple[Intervals, Intervals]:
        one, parameters = self.figures, self.figures.parameters
        large = Intervals(one.calls, one.order, parameters)
        if one.few == one.samples:
            return large, large
        return large, Intervals(
            one.calls_few, one.order, parameters,
            one.calls if len(one.calls) == len(one.calls_few) else None)

    def _line(self, large: Any, small: Any, samples: float) -> Any:
        """The value at ``samples`` on the line through both."""
        many, few = self.figures.samples, self.figures.few
        if many == few:
            return large * (samples / many)
        return small + (large - small) * ((samples - few) / (many - few))
