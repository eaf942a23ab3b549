"""A picture of what the ranks of a pipeline do in one update."""
from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from typing import Any

import chainer
from chainer.training import extension
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ...report.events import Event, chrome_trace
from ...report.quantities import counted
from ...report.stream import Kept, events_of


class PipelineTimeline(extension.Extension):
    """Writes ``timeline.png`` and ``timeline.json``.  Add it on all ranks.

    One row per rank: forward, backward, update, communication, waiting, as in
    figure 3 of Takisawa et al. (see :class:`PipelineUpdater`).  With
    replicas that exchange gradients through a communicator of this package,
    the row also has what that exchange does: encoding, decoding, the
    thread of ``overlap`` and each bucket on its way.  The JSON is a Chrome
    trace, for ``chrome://tracing`` or Perfetto.  Other updates are not
    recorded and lose no time.

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

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        self._start_before(trainer.updater.iteration + 1)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._updater.iteration == self._iteration:
            events = gather_events(self._updater, *self._kept)
            raise_together(self._updater.grid.comm, lambda: self._write(
                trainer.out, events))
        self._start_before(self._updater.iteration + 1)

    def _start_before(self, iteration: int) -> None:
        if iteration == self._iteration:
            self._kept = start_recording(self._updater)

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


def start_recording(updater: Any) -> tuple[Kept, float]:
    """Records the next update; call it on all ranks.

    Returns what :func:`gather_events` is given.  The ranks of a node have one
    clock.  Those of different nodes take the end of a barrier, some tens of
    microseconds apart, for the same moment.
    """
    comm = updater.grid.comm
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    comm.Barrier()
    origin = node.bcast(time.monotonic())
    node.Free()
    return updater.events.keep(), origin


def gather_events(updater: Any, kept: Kept, origin: float
                  ) -> list[Event] | None:
    """Gathers the events of the last update; call it on all ranks.

    Rank 0 gets the events, the others None.
    """
    updater.events.keep_no_more(kept)
    comm = updater.grid.comm
    everyone = comm.gather([
        event._replace(iteration=updater.iteration)
        for event in events_of(kept, comm.rank, origin)
        if event.start <= updater.pipeline.ended - origin])
    return everyone and [*itertools.chain(*everyone)]
