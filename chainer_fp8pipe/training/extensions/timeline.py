"""A picture of what the ranks of a pipeline do in one update."""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import warnings
from typing import Any

import chainer
from chainer.training import extension
from mpi4py import MPI

from ...intercept.patching import AroundCalls
from ...mpi.agreement import raise_together
from ...report.events import Event, chrome_trace
from ...report.quantities import counted
from ...report.stream import Kept, events_of


class PipelineTimeline(extension.Extension):
    """Writes ``timeline.png`` and ``timeline.json``.  Add it on all ranks.

    One row per rank: forward, backward, update, communication, waiting, as in
    figure 3 of Takisawa et al. (see :class:`PipelineUpdater`).  The row of
    a replica also has its exchange: encoding, decoding, the thread of
    ``overlap`` and each bucket on its way.  The JSON is a Chrome trace, for
    ``chrome://tracing`` or Perfetto.  Other updates lose no time.

    Args:
        updater: The trainer's :class:`PipelineUpdater`.
        iteration: The update to record, counted from 1.  The first ones also
            allocate and make connections.
        name: Of the files, without ending.
        title: Above the picture; default: the schedule and its numbers.

    Raises:
        ValueError: ``iteration`` is less than 1.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'PipelineTimeline'

    def __init__(self, updater: Any, iteration: int = 10,
                 name: str = 'timeline', title: str | None = None) -> None:
        if iteration < 1:
            raise ValueError(
                f'iteration must be at least 1, not {iteration!r}')
        self._updater = updater
        self._iteration = iteration
        self._name = name
        self._title = title
        self._calls = AroundCalls()
        self._recording = Recording(updater)

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        self._calls.add(self._updater, 'update', lambda: (
            self._recording
            if self._updater.iteration + 1 == self._iteration
            else contextlib.nullcontext()))

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._updater.iteration == self._iteration:
            events = self._recording.gather()
            raise_together(self._updater.grid.comm, lambda: self._write(
                trainer.out, events))
            self.finalize()

    def finalize(self) -> None:
        """Records nothing any more."""
        self._calls.remove()

    def _write(self, directory: str, events: list[Event] | None) -> None:
        if events is None:
            return
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, self._name)
        with open(f'{path}.json', 'w') as file:
            json.dump(chrome_trace(events), file)
        try:
            from ...report.timeline import plot_timeline
            plot_timeline(events, f'{path}.png', self._title
                          or self._describe())
        except ImportError as error:
            warnings.warn(f'{path}.png is not drawn: {error}', stacklevel=2)

    def _describe(self) -> str:
        schedule, grid = self._updater.schedule, self._updater.grid
        parts = [schedule.name, counted(schedule.stages, 'stage'),
                 counted(schedule.micro_batches, 'micro-batch')]
        if schedule.chunks > 1:
            parts.insert(2, f'{schedule.chunks} chunks each')
        if grid.replicas > 1:
            parts.append(f'{grid.replicas} replicas')
        return ', '.join(parts)


class Recording:
    """The events of an update that is made in this ``with`` block.

    On all ranks.  The ranks of a node have one clock.  Those of different
    nodes take the end of a barrier, some tens of microseconds apart, for the
    same moment.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._kept: Kept = []
        self._origin = 0.0

    def __enter__(self) -> None:
        comm = self._updater.grid.comm
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        comm.Barrier()
        self._origin = node.bcast(time.monotonic())
        node.Free()
        self._kept = self._updater.events.keep()

    def __exit__(self, *exception: object) -> None:
        self._updater.events.keep_no_more(self._kept)

    def events(self) -> list[Event]:
        """Those of this rank, in the order of their ends."""
        return [event._replace(iteration=self._updater.iteration)
                for event in events_of(
                    self._kept, self._updater.grid.comm.rank, self._origin)]

    def gather(self) -> list[Event] | None:
        """Those of all ranks on rank 0, None elsewhere; on all ranks."""
        everyone = self._updater.grid.comm.gather(self.events())
        return everyone and [*itertools.chain(*everyone)]
