"""What a rank's training step goes into: the parts that a plan predicts."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from ...report.records.run_record import PHASES_OF_PARTS
from ...report.stream import EventStream
from .update_marks import CallMark, mark_update

#: As :class:`~chainer_fp8pipe.planning.job.job_plan.JobPlan` names them; the
#: last one is what remains of a step.
PARTS = PASSES, STAGES, EXCHANGE, UPDATE, OTHER = tuple(PHASES_OF_PARTS)

_NAME = 'PredictedTime'


class StepParts:
    """Divides the time from one lap to the next; the first one begins now.

    By the sections of a pipeline's stream.

    Args:
        stream: Of the rank's updater or communicator.
        clock: Gives seconds.
    """

    def __init__(self, stream: EventStream, clock: Callable[[], float]
                 ) -> None:
        self._stream, self._clock = stream, clock
        self._last = self._spent()

    def lap(self) -> numpy.ndarray:
        """Ends a lap; the next one begins.

        Returns:
            Seconds, float64[6]: of the lap, and of each of :data:`PARTS`.
        """
        last, self._last = self._last, self._spent()
        whole, *parts = self._last - last
        return numpy.array([whole, *parts, whole - sum(parts)])

    def end(self) -> None:
        """No lap will follow."""

    def _spent(self) -> numpy.ndarray:
        """The time, and seconds so far of all parts but the last one."""
        seconds = self._stream.seconds
        return numpy.array([self._clock(), *(
            sum(seconds.get(name, 0.0) for name in PHASES_OF_PARTS[part])
            for part in PARTS[:-1])])


class ReplicaParts(StepParts):
    """The same where no pipeline writes down passes and updates.

    Passes last from the model's first call to the optimizer's update, but for
    the exchange; hooks of both tell when that is.  Where the loss function
    does not call the model itself, what comes before passes counts as passes.

    Args:
        stream: Of the communicator.
        clock: Gives seconds.
        optimizer: That updates the model, not ChainerMN's around it.
    """

    def __init__(self, stream: EventStream, clock: Callable[[], float],
                 optimizer: Any) -> None:
        self._began: float | None = None
        self._update_began = self._passes = self._update = 0.0
        self._optimizer = optimizer
        super().__init__(stream, clock)
        optimizer.target.add_hook(CallMark(self._before_call), _NAME)
        self._remove_marks = mark_update(
            optimizer, _NAME, self._before_update, self._after_update)

    def lap(self) -> numpy.ndarray:
        self._began = None
        return super().lap()

    def end(self) -> None:
        self._optimizer.target.delete_hook(_NAME)
        self._remove_marks()

    def _spent(self) -> numpy.ndarray:
        now, _, _, exchange, _ = super()._spent()
        return numpy.array([now, self._passes - exchange, 0.0, exchange,
                            self._update])

    def _before_call(self) -> None:
        if self._began is None:
            self._began = self._clock()

    def _before_update(self) -> None:
        self._update_began = self._clock()
        began = self._last[0] if self._began is None else self._began
        self._passes += self._update_began - began

    def _after_update(self) -> None:
        self._update += self._clock() - self._update_began
