"""``RunReport``: what a run does, in one page that is written as it goes."""
from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import chainer
from chainer.training import extension
from mpi4py import MPI

from ...mpi.attendance import Attendance
from ...mpi.ranks import all_ranks
from ...report.stream import EventStream
from ...report.update_times import UpdateTimes
from ..extensions.update_marks import EveryUpdate
from .report_gathering import ReportGathering
from .report_writing import ReportWriting
from .update_sections import UpdateSections
from .write_schedule import epochs_done, regular_updates

_NAME = 'RunReport'
#: Updates that are kept as the first of their kind: the first one connects,
#: allocates, and sends parameters only.
_SKIPPED, _FIRST = 1, 2
#: Updates between two writes whose events are kept as regular ones.
_REGULAR = 4


class RunReport(extension.Extension):
    """Records a run, and writes a page about it at the end of each epoch.

    Add it on all ranks, with any updater::

        trainer.extend(RunReport(comm))

    The page is ``report.html`` in the result folder, in one file; it shows
    curves, where the time of each rank goes, updates with all their events on
    one clock, which rank or link is slow, what crosses the network, what
    compression does, memory, and what died.  The record that it is made of
    is in the folder ``report`` beside it (:mod:`chainer_fp8pipe.report`);
    a job that is started again goes on with it, and
    ``python -m chainer_fp8pipe report`` makes pages of it later.

    It is written at the ends of epochs, but 10 seconds apart at least, within
    long epochs every 10 minutes, and at the end; the page once a minute.
    Where only rank 0 has the extension the record has rank 0's data alone,
    and says so.  A report that cannot be written is a warning.

    Args:
        comm: All ranks: a communicator of this package, ChainerMN's or
            mpi4py's, or a ``ProcessGrid``; None: ``MPI.COMM_WORLD``.  Of a
            :class:`PipelineUpdater`, those of its grid are taken.
        plan: What :func:`chainer_fp8pipe.plan` gave, or its file: predicted
            times stand beside the measured ones.  It may be on rank 0 only.
        filename: Of the page; None for none, the record only.
        most_events: In the record.  Where there would be more, whole updates
            are left out.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: ``most_events`` is below 1,000.  When the first update is
            done, on all ranks: the plan is none, or is for another job, or
            the result folder has something else in the record's place.
        RuntimeError: When the first update is done: rank 0 has no RunReport;
            on the others.
    """

    trigger = EveryUpdate()
    # After all that reports values and writes files.
    priority = extension.PRIORITY_READER - 50
    default_name = _NAME

    def __init__(self, comm: Any = None, plan: Any = None,
                 filename: str | None = 'report.html',
                 most_events: int = 100_000) -> None:
        self._ranks = MPI.COMM_WORLD if comm is None else all_ranks(comm)
        if not isinstance(self._ranks, MPI.Comm):
            raise TypeError(
                'RunReport needs a communicator of this package, ChainerMN '
                f'or mpi4py, or a ProcessGrid, not {comm!r}')
        if not isinstance(most_events, int) or most_events < 1000:
            raise ValueError('most_events must be an integer of at least '
                             f'1000, not {most_events!r}')
        self._plan, self._filename = plan, filename
        self._most_events = most_events
        self._sections: UpdateSections | None = None
        self._gathering: ReportGathering | None = None
        self._writing: ReportWriting | None = None
        self._next = self._last = 0
        self._error = ''

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        updater = trainer.updater
        grid = getattr(updater, 'grid', None)
        if grid is not None:
            self._ranks = grid.comm
        self._origin = time.monotonic()
        self._begun = updater.iteration, epochs_done(updater)
        self._trainer = trainer
        stream = _stream(updater)
        self._sections = UpdateSections(
            stream, updater, writes_itself=grid is not None)
        each = _EachUpdate(
            lambda: self._times.update_begins(time.monotonic()),
            self._update_ends)
        self._sections.around(updater, 'update', lambda: each)
        self._times = UpdateTimes(stream, self._ranks.rank, self._origin,
                                  updater.iteration)
        communicators = (
            getattr(optimizer, 'communicator', None)
            for optimizer in updater.get_all_optimizers().values())
        self._warming_up: list[Any] = [
            comm for comm in communicators if hasattr(comm, 'is_warming_up')]
        self._skipped, self._first = 0, 0
        self._attendance: Attendance | None = Attendance(self._ranks, _NAME)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._attendance is not None:
            self._begin(trainer)
        if self._writing is not None:
            self._writing.curves.add(trainer)
        if (self._gathering is not None
                and trainer.updater.iteration >= self._next):
            self._write(trainer)

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
        if self._writing is not None:
            self._writing.end(self._trainer, self._error)
            self._writing = None
        self._gathering = None

    # --- details -------------------------------------------------------------

    def _update_ends(self) -> None:
        now = time.monotonic()
        if self._sections is not None:
            self._sections.settle()
            self._times.update_ends(now, self._trainer.updater.iteration,
                                    self._is_first())

    def _is_first(self) -> bool | None:
        """Whether an update is one of the first of its kind.

        None: it is the very first, and like no other.
        """
        warming = any(comm.is_warming_up for comm in self._warming_up)
        if warming != self._warmed:
            self._warmed, self._skipped, self._first = warming, 0, 0
        if self._skipped < _SKIPPED:
            self._skipped += 1
            return None
        self._first += 1
        return self._first <= _FIRST

    _warmed = False

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
                f'RunReport is on {_said(there)} of {self._ranks.size}: its '
                'report has the data of rank 0 only; extend the trainer with '
                'it on all ranks', stacklevel=2)
        self._gathering = ReportGathering(
            self._ranks if everybody else MPI.COMM_SELF, trainer, self._times,
            self._origin)
        writing = ReportWriting(
            trainer, self._begun, self._plan, self._filename,
            self._most_events, self._ranks.size)
        if not self._gathering.begin(writing, there):
            self._gathering = None
            self._stop()
            return
        if self._gathering.comm.rank == 0:
            self._writing = writing
        self._follow(trainer)

    def _follow(self, trainer: chainer.training.Trainer) -> None:
        """All ranks learn from rank 0 when the next write is."""
        assert self._gathering is not None
        now = trainer.updater.iteration
        self._next, self._last = self._gathering.comm.bcast(
            self._writing and self._writing.next(trainer))
        self._times.choose(regular_updates(now, self._next, _REGULAR))

    def _write(self, trainer: chainer.training.Trainer) -> None:
        """Gathers what all ranks have, and writes it; on all ranks."""
        assert self._gathering is not None
        gathered = self._gathering.gather()
        done = trainer.updater.iteration
        self._follow(trainer)
        if self._writing is not None and gathered is not None:
            # The last page is written when the end is known.
            self._writing.write(gathered, page=done < self._last)

    def _stop(self) -> None:
        if self._sections is not None:
            self._sections.remove()
            self._sections = None
            self._times.end()


class _EachUpdate:
    """A ``with`` block that tells when it begins, and ends well."""

    def __init__(self, begin: Callable[[], None],
                 end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()


def _stream(updater: Any) -> EventStream:
    """Where the updater or its communicator writes; else a new one."""
    owners = [updater, *(getattr(optimizer, 'communicator', None)
                         for optimizer
                         in updater.get_all_optimizers().values())]
    streams = (getattr(owner, 'events', None) for owner in owners)
    return next((stream for stream in streams
                 if isinstance(stream, EventStream)), EventStream())


def _said(ranks: tuple[int, ...]) -> str:
    return ('rank ' if len(ranks) == 1 else 'ranks ') + ', '.join(
        map(str, ranks))
