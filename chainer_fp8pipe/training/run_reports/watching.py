"""What a rank notes of each update: its sections, and what it reported."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy

from ...intercept.around_calls import AroundCalls
from ...report.record import CurvePoint
from ...report.stream import EventStream, Section
from ..extensions.update_marks import CallMark, mark_update

_NAME = 'RunReport'
_NUMBERS = numpy.ndarray, numpy.number, float, int

#: Points of one start before they become means of twice as many updates.
_MANY = 500


def epochs_done(updater: Any) -> float:
    """Passes over the data, with the part of the last one; 0.0: unknown."""
    return float(getattr(updater, 'epoch_detail', 0.0))


class UpdateSections:
    """Writes down input, passes, exchange and update, until removed.

    A pipeline writes its passes, exchange and update itself.  Elsewhere,
    ``forward`` is the outermost call of an optimizer's model in training, and
    what a loss function computes outside of it is in no section.

    Args:
        stream: Where to write.
        updater: Whose updates they are.
        writes_itself: It is a pipeline's.

    Attributes:
        calls: Calls of methods that are made in ``with`` blocks.
    """

    def __init__(self, stream: EventStream, updater: Any,
                 writes_itself: bool) -> None:
        self._stream, self.calls = stream, AroundCalls()
        self._open: list[Section] = []
        self._undo: list[Callable[[], None]] = []
        for iterator in (getattr(updater, '_iterators', None) or {}).values():
            self._watch(iterator, 'input', 'next', '__next__')
        if writes_itself:
            return
        self._watch(chainer.Variable, 'backward', 'backward')
        for optimizer in updater.get_all_optimizers().values():
            self._watch(getattr(optimizer, 'communicator', None), 'exchange',
                        'bcast_data', 'multi_node_mean_grad')
            actual = getattr(optimizer, 'actual_optimizer', optimizer)
            actual.target.add_hook(CallMark(*self._ends_of('forward')), _NAME)
            self._undo += [
                functools.partial(actual.target.delete_hook, _NAME),
                mark_update(actual, _NAME, *self._ends_of('update'))]

    def settle(self) -> None:
        """An update is over: ends what an error has left open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Writes nothing any more."""
        self.settle()
        self.calls.remove()
        while self._undo:
            # A user may have removed the hook as well.
            with contextlib.suppress(KeyError):
                self._undo.pop()()

    def _watch(self, owner: Any, section: str, *methods: str) -> None:
        for name in methods:
            self.calls.add(owner, name,
                           functools.partial(self._stream.section, section))

    def _ends_of(self, name: str) -> tuple[Callable[[], None], ...]:
        """What begins a section, and what ends it."""
        return tuple(functools.partial(act, name)
                     for act in (self._begin, self._end))

    def _begin(self, name: str) -> None:
        section = self._stream.section(name)
        section.__enter__()
        self._open.append(section)

    def _end(self, name: str) -> None:
        # What an error has left open inside of it ends with it.
        while any(section.name == name for section in self._open):
            self._open.pop().__exit__(None, None, None)


class CurveMeans:
    """Makes points of the values that updates report.

    At first each update is a point.  As points become many, a point is the
    mean over two updates, then over four, and so on.

    Args:
        start: Number of the start.
        iteration: Updates done before.
    """

    def __init__(self, start: int, iteration: int) -> None:
        self._start, self._begin = start, iteration
        self._clear()
        self._points: list[CurvePoint] = []
        self._made, self._updates = 0, 1

    def add(self, trainer: Any) -> None:
        """Takes over what an update and extensions have reported."""
        updater = trainer.updater
        self._sum_up(trainer.observation)
        if (updater.iteration - self._begin) % self._updates:
            return
        values = {name: total / count for name, (total, count)
                  in self._sums.items()}
        values |= {name: float(value) for name, value
                   in self._summary.compute_mean().items()}
        self._clear()
        if not values:
            return
        self._points.append(CurvePoint(
            self._start, updater.iteration,
            epochs_done(updater), trainer.elapsed_time, values))
        self._made += 1
        if self._made % _MANY == 0:
            self._updates *= 2

    def take(self) -> list[CurvePoint]:
        """The points since the last call."""
        points, self._points = self._points, []
        return points

    def _clear(self) -> None:
        # By name, the sum of values on the CPU, and how many there were.
        self._sums: dict[str, tuple[float, int]] = {}
        self._summary = chainer.reporter.DictSummary()

    def _sum_up(self, observation: Mapping[str, Any]) -> None:
        others = {}
        for name, value in observation.items():
            if isinstance(value, chainer.Variable):
                value = value.array
            if isinstance(value, _NUMBERS) and numpy.ndim(value) == 0:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(value), count + 1
            elif not isinstance(value, (str, bytes)):
                others[name] = value
        if others:      # such as those on a GPU, which are not waited for
            self._summary.add(others)
