"""The predicted time of a step beside the measured one, into ``LogReport``."""
from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.training import extension
from mpi4py import MPI

from ...mpi import all_ranks
from ...mpi.agreement import agree
from ...mpi.waiting import wait_until
from ...planning.job_plan import load_job_plan

#: Updates that are not timed: at the start, and after fp8's in float32.  They
#: allocate memory, and find out in which order buckets travel.
_UNSETTLED = 5


class PredictedTime(extension.Extension):
    """Reports how long steps take and were predicted to take.

    Add it on all ranks.  The values, in seconds, are ``step_time``, from the
    end of an update to the end of the next, and ``predicted_step_time``.  The
    former is the median of an interval, on the slowest rank, and stays until
    the next interval has ended::

        trainer.extend(PredictedTime(plan))
        trainer.extend(PrintReport(
            ['iteration', 'main/loss', 'step_time', 'predicted_step_time']))

    The first interval begins after 5 updates, and after those of fp8 that
    travel in float32.  Where both times differ by more than ``tolerance``,
    rank 0 warns, once.  An interval costs one all-reduce of 8 bytes.

    Args:
        plan: What :func:`~chainer_fp8pipe.planner.plan.plan` gave, or
            the file in which it was saved.
        comm: All ranks: a communicator of mpi4py's or ChainerMN's, or a
            ``ProcessGrid``; None: ``MPI.COMM_WORLD``.
        interval: Updates of which the median is taken.
        tolerance: Relative difference above which rank 0 warns.
        clock: Gives seconds.

    Raises:
        ValueError: The plan is none, or an argument is out of range.  When
            the training begins, on all ranks: the plan is for another number
            of ranks, or predicts no time.
    """

    trigger = 1, 'iteration'
    # Before all others: what they take belongs to the next step everywhere.
    priority = extension.PRIORITY_WRITER + 100
    default_name = 'PredictedTime'

    def __init__(self, plan: Any, comm: Any = None, *, interval: int = 50,
                 tolerance: float = 0.2,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        if interval < 1:
            raise ValueError(f'interval must be at least 1, not {interval!r}')
        if not tolerance > 0:
            raise ValueError(f'tolerance must be above 0, not {tolerance!r}')
        self._plan = load_job_plan(plan)
        self._comm = MPI.COMM_WORLD if comm is None else all_ranks(comm)
        self._interval, self._tolerance = interval, tolerance
        self._clock = clock
        self._unsettled = _UNSETTLED
        self._laps: list[float] = []
        self._seconds: float | None = None
        self._has_warned = False

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        plan = self._plan
        agree(self._comm, {
            'the predicted time': repr(plan.seconds),
            'interval': repr(self._interval),
            'tolerance': repr(self._tolerance)},
            plan.problem(plan.model, self._comm.size)
            or ('' if plan.seconds > 0 else
                'the plan predicts no time; make it again'),
            'Give PredictedTime the same on all ranks.')
        self._iteration = trainer.updater.iteration
        self._last = self._clock()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        updates = max(trainer.updater.iteration - self._iteration, 1)
        now = self._clock()
        lap = (now - self._last) / updates
        self._iteration, self._last = trainer.updater.iteration, now
        if any(getattr(getattr(optimizer, 'communicator', None),
                       'is_warming_up', False) for optimizer
               in trainer.updater.get_all_optimizers().values()):
            self._unsettled = _UNSETTLED
        elif self._unsettled:
            self._unsettled -= 1
        else:
            self._laps.append(lap)
        if len(self._laps) == self._interval:
            self._compare()
        if self._seconds is not None:
            chainer.report({'step_time': self._seconds,
                            'predicted_step_time': self._plan.seconds})

    def _compare(self) -> None:
        """Ends an interval; call it on all ranks."""
        slowest = numpy.array([numpy.median(self._laps)])
        self._laps.clear()
        wait_until(self._comm.Iallreduce(
            MPI.IN_PLACE, slowest, MPI.MAX).Test)
        self._seconds, predicted = float(slowest[0]), self._plan.seconds
        difference = self._seconds / predicted - 1
        if abs(difference) > self._tolerance and not self._has_warned:
            self._has_warned = True
            if self._comm.rank == 0:
                warnings.warn(
                    f'a step takes {1e3 * self._seconds:.4g} ms, '
                    f'{100 * abs(difference):.0f} % '
                    f'{"more" if difference > 0 else "less"} than the '
                    f'predicted {1e3 * predicted:.4g} ms; RunReport shows '
                    'the part that does, and a new plan may be faster',
                    stacklevel=2)
