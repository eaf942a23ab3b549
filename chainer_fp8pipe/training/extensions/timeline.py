"""A picture of what the ranks of a pipeline do in one update."""
from __future__ import annotations

import contextlib
import json
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
from ...report.record import written_whole
from ...report.stream import events_of
from ...report.svg import chrome_trace, picture
from ..checks import check_count


class PipelineTimeline(extension.Extension):
    """Writes ``timeline.svg`` and ``timeline.json``.  Add it on all ranks.

    One row per rank: forward, backward, update and communication, as in
    figure 3 of Takisawa et al. (see :class:`PipelineUpdater`), and the
    exchange of a replica.  The JSON is a Chrome trace, for
    ``chrome://tracing`` or Perfetto.  Nodes take the end of a barrier, some
    tens of microseconds apart, for the same moment.

    Args:
        updater: The trainer's :class:`PipelineUpdater`.
        iteration: The update to record, counted from 1.  The first ones also
            allocate and make connections.

    Raises:
        ValueError: ``iteration`` is less than 1, or no integer.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'PipelineTimeline'

    def __init__(self, updater: Any, iteration: int = 10) -> None:
        check_count('iteration', iteration)
        self._updater, self._iteration = updater, iteration
        self._calls = AroundCalls()

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        self._calls.add(self._updater, 'update', self._recorded)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        if self._updater.iteration + 1 != self._iteration:
            yield
            return
        comm, stream = self._updater.grid.comm, self._updater.events
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        comm.Barrier()
        origin = node.bcast(time.monotonic())
        node.Free()
        kept = stream.keep()
        try:
            yield
        finally:
            stream.keep_no_more(kept)
            self._events = events_of(kept, comm.rank, origin)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._updater.iteration != self._iteration:
            return
        comm, of = self._updater.grid.comm, self._updater.schedule
        path = os.path.join(trainer.out, 'timeline')
        events = [event for own in comm.gather(self._events) or ()
                  for event in own]

        def write() -> None:
            if events:      # only rank 0 has some
                with written_whole(f'{path}.json') as file:
                    json.dump(chrome_trace(events), file)
                with written_whole(f'{path}.svg') as file:
                    file.write(picture(
                        events, f'{of.name}, stages: {of.stages}, '
                        f'micro-batches: {of.micro_batches}'))
        raise_together(comm, write)

    def finalize(self) -> None:
        """Records nothing any more."""
        self._calls.close()
        if self._updater.iteration < self._iteration and not (
                self._updater.grid.comm.rank):
            warnings.warn('PipelineTimeline has recorded nothing: the training'
                          f' ended before update {self._iteration}; pass a '
                          'smaller iteration', stacklevel=2)
