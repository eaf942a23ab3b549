"""A model's seconds and bytes for any number of samples.

Both are taken to grow along a line through the two sizes that were measured:
a part is the same for any batch (calls of functions, gradients of weights'
own arrays), the rest grows with the samples.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ..partition.calls import Call, Parameter
from ..partition.intervals import Intervals

_SUMS = 'forward', 'backward', 'weights'
_BYTES = 'kept', 'deferred', 'temporary', 'plain', 'crossing'


@dataclass(frozen=True)
class ModelFigures:
    """The model's calls for two sizes of a batch, and what else takes time.

    Seconds are those of the processor of the first rank, which computes
    alone, in training.

    Attributes:
        samples: Of the larger batch.
        calls: Of a trace with so many samples.
        few: Samples of the smaller batch; equal to ``samples`` if only one
            was measured.
        calls_few: Of a trace with these.
        order: The model's parameters in groups, in the order of first use.
        parameters: By path.
        update: Seconds in which the optimizer updates all parameters.
        micro_batch: Seconds that each micro-batch of a pipeline takes beside
            its calls.
        optimizer_arrays: Arrays of a parameter's size that the optimizer
            keeps.
        update_temporary: Bytes that an update of a parameter takes for a
            while, as a multiple of the parameter's.
        heap: Bytes that the heap takes between the arrays of a pass, as a
            share of these; the most that was seen is 0.19.
        undivided: Why the model cannot be cut, so that ``calls`` are made
            up, one for each layer; '': it can.
    """

    samples: int
    calls: tuple[Call, ...]
    few: int
    calls_few: tuple[Call, ...]
    order: tuple[tuple[str, ...], ...]
    parameters: Mapping[str, Parameter]
    update: float = 0.0
    micro_batch: float = 0.0
    optimizer_arrays: int = 2
    update_temporary: float = 0.0
    heap: float = 0.2
    undivided: str = ''

    def elements_of(self, names: Iterable[str]) -> int:
        """Elements of these parameters, as far as shapes are known."""
        return sum(self.parameters[name].nbytes
                   // self.parameters[name].dtype.itemsize for name in names)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return self.elements_of(self.parameters)


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
        large, small = (numpy.array([
            [getattr(call, name) for call in calls]
            for name in ('forward', 'backward')])
            for calls in (one.calls, one.calls_few))
        # Few and short samples are measured badly.
        least = 0.5 * large.sum(axis=1) * min(samples / one.samples, 1.0)
        seconds = numpy.maximum(
            self._line(large.sum(axis=1), small.sum(axis=1), samples), least)
        shares = large / numpy.maximum(large.sum(axis=1), 1e-12)[:, None]
        return Pass(*(shares * seconds[:, None]))

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
