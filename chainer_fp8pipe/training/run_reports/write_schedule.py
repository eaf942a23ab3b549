"""When a report is written: at ends of epochs, and seldom enough."""
from __future__ import annotations

import math
from typing import Any

#: Seconds from one write to the next: epochs that are shorter are written
#: together, those that are longer also in between.
SHORTEST, _LONGEST = 10.0, 600.0
#: Updates after which a report is written within an epoch, too.
_MOST = 10_000
#: Writes after which all distances double, and double again: that bounds the
#: record of a long run.
_OFTEN = 256


class WriteSchedule:
    """Says after which update the next write is.

    Args:
        iteration: Updates done when the training begins.
        epochs: Epochs done when the training begins, with the part of one.
        length: When the training ends: a number and ``'iteration'`` or
            ``'epoch'``; None: unknown.
    """

    def __init__(self, iteration: int, epochs: float,
                 length: tuple[float, str] | None) -> None:
        self._begin, self._length = (iteration, epochs), length
        self._writes = 0

    def next(self, iteration: int, epochs: float, step: float) -> int:
        """The number of the update after which to write.

        Args:
            iteration: Updates done.
            epochs: Epochs done, with the part of one.
            step: Seconds of an update.
        """
        self._writes += 1
        per_update = self._epochs_of_an_update(iteration, epochs)
        between = 1 << (self._writes - 1) // _OFTEN
        step = max(step, 1e-9) / between
        least = max(1, math.ceil(SHORTEST / step - _TINY))
        most = max(least, min(_MOST * between, int(_LONGEST / step)))
        found = iteration + most
        if per_update > 0:
            target = math.floor(epochs + _TINY) + between
            target += max(0, math.ceil(
                epochs + (least - 1) * per_update - target + _TINY))
            found = min(found, iteration + _updates(
                target - epochs, per_update))
        return max(iteration + 1, min(found, self.last(iteration, epochs)))

    def last(self, iteration: int, epochs: float) -> int:
        """The last update of the training; one out of reach: unknown."""
        if self._length is None:
            return 1 << 62
        number, unit = self._length
        if unit == 'iteration':
            return int(number)
        per_update = self._epochs_of_an_update(iteration, epochs)
        if not per_update > 0:
            return 1 << 62
        return iteration + _updates(number - epochs, per_update)

    def _epochs_of_an_update(self, iteration: int, epochs: float) -> float:
        updates = iteration - self._begin[0]
        return (epochs - self._begin[1]) / updates if updates > 0 else 0.0


# Rounding of a sum of shares of an epoch.
_TINY = 1e-6


def _updates(epochs: float, per_update: float) -> int:
    return max(0, math.ceil(epochs / per_update - _TINY))


def regular_updates(iteration: int, following: int, count: int) -> list[int]:
    """So many updates after ``iteration``, evenly, up to ``following``."""
    updates = following - iteration
    return sorted({iteration + max(1, round((place + 0.5) * updates / count))
                   for place in range(count)})


def epochs_done(updater: Any) -> float:
    """Passes over the data, with the part of the last one; 0.0: unknown."""
    return float(getattr(updater, 'epoch_detail', 0.0))


def training_length(trainer: Any) -> tuple[float, str] | None:
    """When a trainer stops by itself; None if its trigger does not say."""
    ask = getattr(trainer.stop_trigger, 'get_training_length', None)
    if ask is None:
        return None
    number, unit = ask()
    return (number, unit) if unit in ('iteration', 'epoch') else None
