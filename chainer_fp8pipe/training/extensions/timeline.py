"""A picture of what the ranks of a pipeline do in one update."""
from __future__ import annotations

import contextlib
import itertools
import json
import numbers
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.training import extension
from mpi4py import MPI

from ...intercept.patching import AroundCalls
from ...mpi.agreement import raise_together
from ...report.events import Event, chrome_trace
from ...report.quantities import counted
from ...report.record import written_whole
from ...report.stream import Kept, events_of
from ...report.timeline import picture


class PipelineTimeline(extension.Extension):
    """Writes ``timeline.svg`` and ``timeline.json``.  Add it on all ranks.

    One row per rank: forward, backward, update, communication, waiting, as in
    figure 3 of Takisawa et al. (see :class:`PipelineUpdater`).  The row of
    a replica also has its exchange: encoding, decoding, the thread of
    ``overlap`` and each bucket on its way.  The JSON is a Chrome trace, for
    ``chrome://tracing`` or Perfetto.  Other updates lose no time.

    The ranks of a node have one clock.  Those of different nodes take the end
    of a barrier, some tens of microseconds apart, for the same moment.

    Args:
        updater: The trainer's :class:`PipelineUpdater`.
        iteration: The update to record, counted from 1.  The first ones also
            allocate and make connections.  A training that ends before it
            warns.
        name: Of the files, without ending.
        title: Above the picture; default: the schedule and its numbers.

    Raises:
        ValueError: ``iteration`` is less than 1, or no integer.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'PipelineTimeline'

    def __init__(self, updater: Any, iteration: Any = 10,
                 name: str = 'timeline', title: str | None = None) -> None:
        if not isinstance(iteration, numbers.Integral) or iteration < 1:
            raise ValueError(
                'iteration must be an integer of at least 1, not '
                f'{iteration!r}')
        self._updater, self._iteration = updater, int(iteration)
        self._name, self._title = name, title
        self._calls = AroundCalls()
        self._kept: Kept = []
        self._origin = 0.0

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        self._calls.add(self._updater, 'update', lambda: (
            self._record() if self._updater.iteration + 1 == self._iteration
            else contextlib.nullcontext()))

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._updater.iteration == self._iteration:
            comm = self._updater.grid.comm
            everyone = comm.gather(events_of(self._kept, comm.rank,
                                             self._origin))
            raise_together(comm, lambda: self._write(
                trainer.out, [*itertools.chain(*(everyone or ()))]))
            self._calls.remove()

    def finalize(self) -> None:
        """Records nothing any more."""
        self._calls.remove()
        if self._updater.iteration < self._iteration and not (
                self._updater.grid.comm.rank):
            warnings.warn(
                'PipelineTimeline has recorded nothing: the training ended '
                f'after update {self._updater.iteration}, before update '
                f'{self._iteration}; pass a smaller iteration', stacklevel=2)

    @contextlib.contextmanager
    def _record(self) -> Iterator[None]:
        comm = self._updater.grid.comm
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        comm.Barrier()
        self._origin = node.bcast(time.monotonic())
        node.Free()
        self._kept = self._updater.events.keep()
        try:
            yield
        finally:
            self._updater.events.keep_no_more(self._kept)

    def _write(self, directory: str, events: list[Event]) -> None:
        if not events:      # but rank 0 has none
            return
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, self._name)
        events = [event._replace(iteration=self._iteration)
                  for event in events]
        with written_whole(f'{path}.json') as file:
            json.dump(chrome_trace(events), file)
        with written_whole(f'{path}.svg') as file:
            file.write(picture(events, self._title or self._describe()))

    def _describe(self) -> str:
        schedule, grid = self._updater.schedule, self._updater.grid
        parts = [schedule.name, counted(schedule.stages, 'stage'),
                 counted(schedule.micro_batches, 'micro-batch')]
        if schedule.chunks > 1:
            parts.insert(2, f'{schedule.chunks} chunks each')
        if grid.replicas > 1:
            parts.append(f'{grid.replicas} replicas')
        return ', '.join(parts)
