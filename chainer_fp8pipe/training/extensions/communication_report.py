"""Bytes and seconds of the gradient exchange, into ``LogReport``."""
from __future__ import annotations

from typing import Any

import chainer
from chainer.training import extension

from ...report.stream import EventStream


class CommunicationReport(extension.Extension):
    """Reports what an update's exchange cost this rank.

    Values, means per update since the last call: ``comm/bytes`` (sent),
    ``comm/encode``, ``comm/exchange`` and ``comm/decode`` (milliseconds;
    the exchange includes waiting for slower ranks).  With the rest of an
    iteration they make the breakdown of the fp8 paper's figure 5.  Add it
    before or after ``LogReport``, which then writes the means::

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
