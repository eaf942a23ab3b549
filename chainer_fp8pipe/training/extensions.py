"""Trainer extensions: snapshots, what the exchange costs, a timeline."""
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

from ..intercept.patching import AroundCalls
from ..mpi.agreement import raise_together
from ..pipeline.schedules import at_least_one
from ..report.record import written_whole
from ..report.stream import EventStream, events_of
from ..report.svg import chrome_trace, picture
from .snapshots.snapshot import (
    Snapshot,
    find_snapshots,
    resume,
    save_whole_model,
)

__all__ = ['CommunicationReport', 'CompressionReport', 'PipelineTimeline',
           'Snapshot', 'find_snapshots', 'resume', 'save_whole_model']


class CommunicationReport(extension.Extension):
    """Reports what an update's exchange cost this rank.

    Values, means per update since the last call: ``comm/bytes`` (sent),
    ``comm/encode``, ``comm/exchange`` and ``comm/decode`` (milliseconds;
    the exchange includes waiting for slower ranks).  Add it before or after
    ``LogReport``, which then writes the means::

        trainer.extend(CommunicationReport(comm))
        trainer.extend(PrintReport(['iteration', 'main/loss', 'comm/bytes']))

    Args:
        comm: A communicator of this package.

    Raises:
        TypeError: The communicator is ChainerMN's.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_EDITOR
    default_name = 'CommunicationReport'

    def __init__(self, comm: Any) -> None:
        if not isinstance(getattr(comm, 'events', None), EventStream):
            raise TypeError(
                'CommunicationReport needs a communicator made by '
                f'chainer_fp8pipe.create_communicator, not {comm!r}')
        self._events = comm.events
        self._last = self._now()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        now = self._now()
        updates = now['updates'] - self._last['updates']
        if updates:
            chainer.report({
                name: (now[name] - self._last[name]) / updates
                for name in now if name != 'updates'})
        self._last = now

    def _now(self) -> dict[str, float]:
        events = self._events
        return {'updates': events.updates, 'comm/bytes': events.bytes_sent, **{
            f'comm/{name}': 1000 * events.seconds[name]     # milliseconds
            for name in ('encode', 'exchange', 'decode')}}


class CompressionReport(extension.Extension):
    """Writes the fp8 codec's effect on each tensor to ``compression.json``.

    Each call, every 10 iterations by default, adds per tensor the ratio q that
    sets its scale, and the share of rank 0's elements that were clipped since
    the last one; beside a second optimizer's, as of ``'critic:/l1/W'``.

    Args:
        comm: An fp8 communicator of this package.

    Raises:
        TypeError: The communicator is not an fp8 one of this package.
    """

    trigger = 10, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'CompressionReport'

    def __init__(self, comm: Any) -> None:
        if not getattr(comm, 'name', '').startswith('fp8'):
            raise TypeError('CompressionReport needs a communicator made by '
                            "chainer_fp8pipe.create_communicator('fp8'), "
                            f'not {comm!r}')
        self._comm: Any = comm

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Goes on with the file of a run that goes on."""
        self._path = os.path.join(trainer.out, 'compression.json')
        self._last, self._record = self._reports(trainer), []
        with contextlib.suppress(FileNotFoundError), open(self._path) as file:
            self._record = [entry for entry in json.load(file) if entry[
                'iteration'] <= trainer.updater.iteration]

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        before, self._last = self._last, self._reports(trainer)
        tensors = {}
        for name, (q, clipped, encoded) in self._last.items():
            _, clipped_then, encoded_then = before.get(name, (q, 0, 0))
            if encoded > encoded_then:
                tensors[name] = {'q': q, 'clipped': (
                    clipped - clipped_then) / (encoded - encoded_then)}
        if tensors and self._comm.rank == 0:
            self._record.append({'iteration': trainer.updater.iteration,
                                 'tensors': tensors})
            with written_whole(self._path) as file:
                json.dump(self._record, file, indent=1)

    def _reports(self, trainer: chainer.training.Trainer) -> dict[str, Any]:
        return {('' if owner == 'main' else f'{owner}:') + name: report
                for owner, one in trainer.updater.get_all_optimizers().items()
                if vars(one).get('communicator') is self._comm
                for name, report in self._comm.report(one.target).items()}


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
        ValueError: ``iteration`` is no whole number of at least 1.
        TypeError: ``updater`` is another one.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'PipelineTimeline'

    def __init__(self, updater: Any, iteration: int = 10) -> None:
        self._updater, self._iteration = updater, at_least_one(
            'iteration', iteration)
        if not hasattr(updater, 'schedule'):
            raise TypeError(
                f'PipelineTimeline draws the updates of a PipelineUpdater, not'
                f' of a {type(updater).__name__}; RunReport draws those of '
                'any updater')
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
