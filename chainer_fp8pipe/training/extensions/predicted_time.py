"""The predicted time of a step beside the measured one, into ``LogReport``."""
from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.training import extension
from chainermn.optimizers import _MultiNodeOptimizer
from mpi4py import MPI

from ...mpi.agreement import Signature, agree
from ...mpi.ranks import all_ranks
from ...mpi.waiting import wait_until
from ...planning.job.job_plan import load_job_plan
from ...report.stream import EventStream
from .step_difference import explain
from .step_parts import ReplicaParts, StepParts

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
    rank 0 warns, once: which part of a step takes longer than predicted, and
    what can be done about that.  An interval costs one all-reduce of 8 bytes.

    The updater is a :class:`~chainer_fp8pipe.PipelineUpdater`, or Chainer's
    with ChainerMN's multi-node optimizer around a communicator of this
    package.

    Args:
        plan: What :func:`~chainer_fp8pipe.planner.planned_job.plan` gave, or
            the file in which it was saved.
        comm: All ranks: a communicator of mpi4py's or ChainerMN's, or a
            ``ProcessGrid``; None: ``MPI.COMM_WORLD``.
        interval: Updates of which the median is taken.
        tolerance: Relative difference above which rank 0 warns.
        clock: Gives seconds.

    Raises:
        OSError: The file cannot be read.
        ValueError: The plan is none, or an argument is out of range.  When
            the training begins, on all ranks: the plan is for another number
            of ranks, or the training is of another kind.
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
        self._plan = load_job_plan(getattr(plan, 'plan', plan))
        self._comm = MPI.COMM_WORLD if comm is None else all_ranks(comm)
        self._interval, self._tolerance = interval, tolerance
        self._clock = clock
        self._parts: StepParts | None = None
        self._iteration = 0
        self._unsettled = _UNSETTLED
        self._laps: list[numpy.ndarray] = []
        self._seconds: float | None = None
        self._has_warned = False

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        plan, updater = self._plan, trainer.updater
        agree(self._comm, Signature({
            'the predicted time': repr(plan.seconds),
            'interval': repr(self._interval),
            'tolerance': repr(self._tolerance)}),
            plan.problem(plan.model, self._comm.size) or _problem(updater)
            or ('' if plan.seconds > 0 else 'the plan predicts no time; '
                'make it again'),
            'Give PredictedTime the same on all ranks.')
        optimizer = updater.get_optimizer('main')
        self._communicator = getattr(optimizer, 'communicator', None)
        self._iteration = updater.iteration
        self._parts = (
            StepParts(updater.events, self._clock) if _is_pipeline(updater)
            else ReplicaParts(optimizer.communicator.events, self._clock,
                              optimizer.actual_optimizer))

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        assert self._parts is not None      # initialize() was called
        updates = trainer.updater.iteration - self._iteration
        self._iteration += updates
        lap = self._parts.lap() / max(updates, 1)
        if getattr(self._communicator, 'is_warming_up', False):
            self._unsettled = _UNSETTLED
        elif self._unsettled:
            self._unsettled -= 1
        else:
            self._laps.append(lap)
        if len(self._laps) == self._interval:
            self._compare(trainer.updater)
        if self._seconds is not None:
            chainer.report({'step_time': self._seconds,
                            'predicted_step_time': self._plan.seconds})

    def finalize(self) -> None:
        if self._parts is not None:
            self._parts.end()
            self._parts = None

    def _compare(self, updater: Any) -> None:
        """Ends an interval; call it on all ranks."""
        medians = numpy.median(self._laps, axis=0)
        self._laps.clear()
        slowest = medians[:1].copy()
        wait_until(self._comm.Iallreduce(
            MPI.IN_PLACE, slowest, MPI.MAX).Test)
        self._seconds = float(slowest[0])
        difference = abs(self._seconds / self._plan.seconds - 1)
        if self._has_warned or difference <= self._tolerance:
            return
        self._has_warned = True
        everyone = self._comm.gather(medians)
        if everyone is not None:
            warnings.warn(
                explain(self._plan, numpy.array(everyone),
                        _actual(updater, self._communicator)), stacklevel=2)


def _is_pipeline(updater: Any) -> bool:
    return isinstance(getattr(updater, 'events', None), EventStream)


def _problem(updater: Any) -> str:
    """Why the steps of an updater cannot be timed; '' if they can."""
    if _is_pipeline(updater):
        return ''
    optimizers = updater.get_all_optimizers()
    optimizer = optimizers.get('main')
    if len(optimizers) == 1 and type(optimizer) is _MultiNodeOptimizer and (
            isinstance(getattr(optimizer.communicator, 'events', None),
                       EventStream)):
        return ''
    return ('PredictedTime needs a PipelineUpdater, or one multi-node '
            'optimizer around a communicator made by chainer_fp8pipe.'
            'create_communicator')


def _actual(updater: Any, communicator: Any) -> dict[str, Any]:
    """How a job is run, by the names of a plan's choice."""
    found: dict[str, Any] = {'stages': 1}
    if _is_pipeline(updater):
        schedule = updater.schedule
        found = {'stages': schedule.stages, 'schedule': schedule.name,
                 'micro_batches': schedule.micro_batches}
    if hasattr(communicator, 'options'):
        options = communicator.options
        found |= {'codec': communicator.name, 'algorithm': options.algorithm,
                  'overlap': options.overlap}
    return found
