"""Means of what is reported, for the curves of a report."""
from __future__ import annotations

from typing import Any

import chainer

from ...report.record import CurvePoint

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
        self._summary = chainer.reporter.DictSummary()
        self._points: list[CurvePoint] = []
        self._made, self._updates = 0, 1

    def add(self, trainer: Any) -> None:
        """Takes over what an update and extensions have reported."""
        updater = trainer.updater
        self._summary.add({
            name: value for name, value in trainer.observation.items()
            if not isinstance(value, (str, bytes))})
        if (updater.iteration - self._begin) % self._updates:
            return
        values = {name: float(value) for name, value
                  in self._summary.compute_mean().items()}
        self._summary = chainer.reporter.DictSummary()
        if not values:
            return
        self._points.append(CurvePoint(
            self._start, updater.iteration,
            float(getattr(updater, 'epoch_detail', 0.0)),
            trainer.elapsed_time, values))
        self._made += 1
        if self._made % _MANY == 0:
            self._updates *= 2

    def take(self) -> list[CurvePoint]:
        """The points since the last call."""
        points, self._points = self._points, []
        return points
