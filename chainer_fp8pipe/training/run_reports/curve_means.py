"""Means of what is reported, for the curves of a report."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from ...report.record import CurvePoint
from .write_schedule import epochs_done

_NUMBERS = numpy.ndarray, numpy.number, float, int

#: Points of one start before they become means of twice as many updates.
_MANY = 500


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
