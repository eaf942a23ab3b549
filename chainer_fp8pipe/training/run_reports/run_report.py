"""``RunReport``: what a run does, in one page that is written as it goes."""
# After each update a rank notes its times (UpdateTimes), and rank 0 what was
# reported (CurveMeans).  Now and then all ranks bring together what they have,
# and rank 0 writes it (Recorder): at the ends of epochs, 10 seconds apart at
# least, within long epochs every 10 minutes, and after the last update.  All
# distances double after 256 writes, which bounds the record of a long run.
# Rank 0 says it as the number of an update, so that no rank asks its clock.
#
# Nothing here ends a training, but for what a user can mend at once: a plan
# for another job, somebody else's file in the record's place.
from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.training import extension
from mpi4py import MPI

from ...mpi import all_ranks
from ...mpi.agreement import Attendance
from ...report.stream import stream_of
from ..extensions.update_marks import EveryUpdate
from .recorder import Recorder
from .watching import UpdateSections, UpdateTimes, epochs_done

_NAME = 'RunReport'
#: Updates between two writes whose events are kept as regular ones.
_REGULAR = 4
#: Seconds from one write to the next.
SHORTEST, _LONGEST = 10.0, 600.0
#: Updates from one write to the next at most: their times are kept till then.
_MOST = 10_000
#: Writes after which these distances double, and double again.
_OFTEN = 256
# Rounding of a sum of shares of an epoch.
_TINY = 1e-6


class RunReport(extension.Extension):
    """Records a run, prints its verdict, and writes a page about it.

    Add it on all ranks, with any updater::

        trainer.extend(RunReport(comm))

    At the end rank 0 prints the verdict: final loss and accuracy, times,
    bytes, restarts, and the costliest part of an update.  The page is the file
    ``report.html`` in the result folder.  It shows the verdict, curves, times
    of each rank, slow ranks and links, bytes, compression and memory.

    The record is ``report.jsonl`` beside it.  A job that is started again
    goes on with it, and ``python -m chainer_fp8pipe report`` makes pages of
    it later.  Ranks write it at ends of epochs at least 10 seconds apart,
    every 10 minutes in long epochs, and at the end; rank 0 writes the page
    once a minute.  A report that cannot be written is a warning.

    Args:
        comm: All ranks: a communicator of this package, ChainerMN's or
            mpi4py's, or a ``ProcessGrid``; None: ``MPI.COMM_WORLD``.  Of a
            :class:`PipelineUpdater`, those of its grid are taken.
        plan: The result of :func:`chainer_fp8pipe.plan`, or its file:
            predicted times stand beside the measured ones.  It may be on
            rank 0 only.
        filename: Of the page; None for none, the record only.
        prints: Whether rank 0 prints the verdict.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: After the first update, on all ranks: the plan is none or
            another job's, or another file is in the record's place.
        RuntimeError: After the first update: rank 0 has no RunReport.
    """

    trigger = EveryUpdate()
    # After all that reports values and writes files.
    priority = extension.PRIORITY_READER - 50
    default_name = _NAME

    def __init__(self, comm: Any = None, plan: Any = None,
                 filename: str | None = 'report.html', prints: bool = True
                 ) -> None:
        self._ranks = MPI.COMM_WORLD if comm is None else all_ranks(comm)
        if not isinstance(self._ranks, MPI.Comm):
            raise TypeError(
                'RunReport needs a communicator of this package, ChainerMN '
                f'or mpi4py, or a ProcessGrid, not {comm!r}')
        self._plan, self._filename, self._prints = plan, filename, prints
        self._sections: UpdateSections | None = None
        self._recorder: Recorder | None = None
        self._next = self._last = 0
        self._error = ''

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        updater = trainer.updater
        grid = getattr(updater, 'grid', None)
        if grid is not None:
            self._ranks = grid.comm
        self._trainer, self._origin = trainer, time.monotonic()
        stream = stream_of(updater, *(
            getattr(optimizer, 'communicator', None)
            for optimizer in updater.get_all_optimizers().values()))
        self._times = UpdateTimes(stream, self._ranks.rank, self._origin,
                                  updater.iteration)
        self._sections = UpdateSections(stream, updater,
                                        writes_itself=grid is not None)
        self._sections.calls.add(updater, 'update', self._each_update)
        self._schedule = WriteSchedule(trainer)
        self._attendance: Attendance | None = Attendance(self._ranks, _NAME)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._attendance is not None:
            self._begin(trainer)
        if self._recorder is None:
            return
        if self._recorder.curves is not None:
            self._recorder.curves.add(trainer)
        done = trainer.updater.iteration
        if done >= self._next:
            # The last page is written when the end is known.
            self._recorder.write(page=done < self._last)
            self._follow()

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception,
                 tb: Any) -> None:
        self._error = f'{type(exc).__name__}: {exc}'

    def finalize(self) -> None:
        """Ends the record; without messages, as others may have failed."""
        if self._sections is None:
            return
        self._stop()
        # Such as KeyboardInterrupt, of which a trainer tells nobody.
        found = sys.exc_info()[1]
        if found is not None and not self._error:
            self._error = f'{type(found).__name__}: {found}'
        if self._recorder is not None:
            self._recorder.end(self._error)
            self._recorder = None

    # --- details -------------------------------------------------------------

    @contextlib.contextmanager
    def _each_update(self) -> Iterator[None]:
        self._times.update_begins(time.monotonic())
        yield
        now = time.monotonic()
        if self._sections is not None:
            self._sections.settle()
            self._times.update_ends(now, self._trainer.updater.iteration)

    def _begin(self, trainer: chainer.training.Trainer) -> None:
        """After the first update, when all ranks know who is there."""
        assert self._attendance is not None
        there, self._attendance = self._attendance.settle(), None
        everybody = len(there) == self._ranks.size
        if not everybody and self._ranks.rank:
            self._stop()        # rank 0 says why
            return
        if not everybody:
            warnings.warn(
                f'RunReport is on rank{"s"[:len(there) - 1]} '
                f'{", ".join(map(str, there))} of {self._ranks.size}, so it '
                'has the data of rank 0 only; extend the trainer with it on '
                'all ranks', stacklevel=2)
        recorder = Recorder(
            self._ranks if everybody else MPI.COMM_SELF, trainer, self._times,
            self._origin, self._filename, self._prints)
        if recorder.begin(there, self._ranks.size, self._schedule.begun[0],
                          self._plan):
            self._recorder = recorder
            self._follow()
        else:
            self._stop()

    def _follow(self) -> None:
        """All ranks learn from rank 0 when the next write is."""
        assert self._recorder is not None
        comm, now = self._recorder.comm, self._trainer.updater.iteration
        self._next, self._last = comm.bcast(
            None if comm.rank else self._schedule.next(
                time.monotonic() - self._origin))
        self._times.choose(regular_updates(now, self._next, _REGULAR))

    def _stop(self) -> None:
        if self._sections is not None:
            self._sections.remove()
            self._sections = None
            self._times.end()


# --- when to write -----------------------------------------------------------

class WriteSchedule:
    """Says after which update the next write is.

    Args:
        trainer: Of a training that begins.

    Attributes:
        begun: Updates and epochs done when it began.
    """

    def __init__(self, trainer: Any) -> None:
        self._updater = trainer.updater
        self.begun = trainer.updater.iteration, epochs_done(trainer.updater)
        ask = getattr(trainer.stop_trigger, 'get_training_length', None)
        self._length: tuple[float, str] = ask() if ask else (math.inf, '')
        self._writes = 0

    def next(self, passed: float) -> tuple[int, int]:
        """The update after which to write, and the last of the training.

        Args:
            passed: Seconds of training so far.
        """
        done, epochs = self._updater.iteration, epochs_done(self._updater)
        updates = max(done - self.begun[0], 1)
        per_update = (epochs - self.begun[1]) / updates
        times = 1 << self._writes // _OFTEN
        self._writes += 1
        step = max(passed, 1e-9) / updates / times
        least = max(1, math.ceil(SHORTEST / step - _TINY))
        found = done + max(least, min(_MOST * times, int(_LONGEST / step)))
        if per_update > 0:
            # The first end of an epoch that is far enough away.
            end = math.floor(epochs + _TINY) + times
            end += max(0, math.ceil(
                epochs + (least - 1) * per_update - end + _TINY))
            found = min(found, done + _updates(end - epochs, per_update))
        last = self._last(done, epochs, per_update)
        return max(done + 1, min(found, last)), last

    def _last(self, done: int, epochs: float, per_update: float) -> int:
        """The last update of the training; one out of reach: unknown."""
        length, unit = self._length
        if unit == 'iteration':
            return int(length)
        if unit == 'epoch' and per_update > 0:
            return done + _updates(length - epochs, per_update)
        return 1 << 62


def _updates(epochs: float, per_update: float) -> int:
    return max(0, math.ceil(epochs / per_update - _TINY))


def regular_updates(iteration: int, following: int, count: int) -> list[int]:
    """So many updates after ``iteration``, evenly, up to ``following``."""
    updates = following - iteration
    return sorted({iteration + max(1, round((place + 0.5) * updates / count))
                   for place in range(count)})
