"""What the gradient exchange costs, and what fp8 does to each tensor."""
from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import chainer
from chainer.training import extension

from ...report.record import written_whole
from ...report.stream import EventStream


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
        milliseconds = {f'comm/{name}': 1000 * events.seconds[name]
                        for name in ('encode', 'exchange', 'decode')}
        return {'updates': events.updates,
                'comm/bytes': events.bytes_sent, **milliseconds}


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
