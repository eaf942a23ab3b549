"""What the gradient exchange costs, and what fp8 does to each tensor."""
from __future__ import annotations

import json
import os
from typing import Any

import chainer
import numpy
from chainer.training import extension

from ...codecs import TensorReport
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
    """Records the fp8 codec's effect on each tensor.

    Each call records, per tensor, the ratio q that sets its scale, and the
    share of this rank's elements that were clipped since the last call.  The
    record is written as JSON at each call.  With several optimizers on the
    communicator, tensors' names begin with their optimizer's:
    ``'critic:/l1/W'``.

    Its default trigger is every 10 iterations.

    Args:
        comm: An fp8 communicator of this package.
        filename: Of the record, in the trainer's output directory.

    Raises:
        TypeError: The communicator is not an fp8 one of this package.
    """

    trigger = 10, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'CompressionReport'

    def __init__(self, comm: Any, filename: str = 'compression.json'
                 ) -> None:
        if not getattr(comm, 'name', '').startswith('fp8'):
            raise TypeError('CompressionReport needs a communicator made by '
                            "chainer_fp8pipe.create_communicator('fp8'), "
                            f'not {comm!r}')
        self._comm = comm
        self._filename = filename
        self._out = ''
        self._record: list[dict[str, Any]] = []
        self._last: dict[str, tuple[float, float]] = {}

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        self._out = trainer.out

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        tensors = {}
        for name, report in self._reports(trainer).items():
            share = clipped_share(self._last, name, report.clipped,
                                  report.encoded)
            if share is not None:
                tensors[name] = {'q': report.q, 'clipped': share}
                self._comm.events.mark('compression', name, **tensors[name])
        if tensors and self._comm.rank == 0:
            self._record.append({'iteration': trainer.updater.iteration,
                                 'tensors': tensors})
        self._write()

    def _reports(self, trainer: chainer.training.Trainer
                 ) -> dict[str, TensorReport]:
        models = {name: optimizer.target for name, optimizer
                  in trainer.updater.get_all_optimizers().items()
                  if getattr(optimizer, 'communicator', None) is self._comm}
        return {f'{owner}:{name}' if models.keys() - {owner} else name: report
                for owner, model in models.items()
                for name, report in self._comm.report(model).items()}

    def finalize(self) -> None:
        self._write()

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        # As bytes: NumPy takes four of them for each character of a text.
        if isinstance(serializer, chainer.serializer.Serializer):
            text = json.dumps([self._record, self._last]).encode()
            serializer('record', numpy.frombuffer(text, numpy.uint8))
        else:
            saved = serializer('record', None)
            self._record, last = json.loads(saved.tobytes())
            self._last = {name: (clipped, encoded) for name, (
                clipped, encoded) in last.items()}

    def _write(self) -> None:
        if not self._record or self._comm.rank:
            return
        os.makedirs(self._out, exist_ok=True)
        with written_whole(os.path.join(self._out, self._filename)) as file:
            json.dump(self._record, file, indent=1)


def clipped_share(last: dict[str, tuple[float, float]], name: str,
                  clipped: float, encoded: float) -> float | None:
    """Which share of a tensor's elements was clipped since the last look.

    Args:
        last: By tensor, the clipped and the encoded elements at the last
            look; is kept up to date.
        name: The tensor's.
        clipped: Elements so far.
        encoded: Elements so far.

    Returns:
        None: nothing was encoded since.
    """
    before, seen = last.get(name, (0, 0))
    last[name] = clipped, encoded
    return (clipped - before) / (encoded - seen) if encoded > seen else None
