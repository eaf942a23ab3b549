"""What the gradient exchange costs, and what fp8 does to each tensor."""
from __future__ import annotations

import json
import os
import warnings
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


_MOST_IN_LEGEND = 24


class CompressionReport(extension.Extension):
    """Records and plots the fp8 codec's effect on each tensor.

    Each call records, per tensor, the ratio q that sets its scale, and the
    share of this rank's elements that were clipped since the last call.  The
    record is written as JSON, and drawn as PNG if matplotlib is installed, at
    the end of each epoch and of the run.  With several optimizers on the
    communicator, tensors' names begin with their optimizer's:
    ``'critic:/l1/W'``.

    Its default trigger is every 10 iterations.

    Args:
        comm: An fp8 communicator of this package.
        filename: Of the record, in the trainer's output directory.
        plot: Of the picture; None for none.

    Raises:
        TypeError: The communicator is not an fp8 one of this package.
    """

    trigger = 10, 'iteration'
    priority = extension.PRIORITY_READER
    default_name = 'CompressionReport'

    def __init__(self, comm: Any, filename: str = 'compression.json',
                 plot: str | None = 'compression.png') -> None:
        if not getattr(comm, 'name', '').startswith('fp8'):
            raise TypeError('CompressionReport needs a communicator made by '
                            "chainer_fp8pipe.create_communicator('fp8'), "
                            f'not {comm!r}')
        self._comm = comm
        self._filename = filename
        self._plot = plot
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
        if trainer.updater.is_new_epoch:
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
        if self._plot:
            plot_compression(self._record,
                             os.path.join(self._out, self._plot))


def plot_compression(record: list[dict[str, Any]], path: str) -> None:
    """Draws the record of a :class:`CompressionReport` as PNG.

    Weights are drawn solid and biases dotted in their layer's colour, as in
    the paper.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn('no picture of the compression: matplotlib is not '
                      'installed (pip install matplotlib)', stacklevel=2)
        return
    names = sorted({name for entry in record for name in entry['tensors']})
    layers = sorted({_layer(name) for name in names})
    colours = colormaps['tab10' if len(layers) <= 10 else 'turbo']
    figure = Figure(figsize=(9, 7), layout='constrained')
    scale, clipped = figure.subplots(2, 1, sharex=True)
    for name in names:
        points = [(entry['iteration'], entry['tensors'][name])
                  for entry in record if name in entry['tensors']]
        place = layers.index(_layer(name))
        style = {
            'color': colours(place if len(layers) <= 10
                             else place / (len(layers) - 1)),
            'linestyle': '-' if name.endswith('/W') else ':',
            'label': name, 'marker': '.', 'markersize': 3}
        iterations = [iteration for iteration, _ in points]
        scale.plot(iterations, [tensor['q'] for _, tensor in points],
                   drawstyle='steps-post', **style)
        clipped.plot(iterations,
                     [100 * tensor['clipped'] for _, tensor in points],
                     **style)
    scale.set_yscale('log')
    scale.set_ylabel('q, the |gradient / parameter| that sets the scale')
    clipped.set_ylabel('clipped elements [%]')
    clipped.set_ylim(bottom=0)
    clipped.set_xlabel('iteration')
    for axes in (scale, clipped):
        axes.grid(alpha=0.3)
    handles, labels = scale.get_legend_handles_labels()
    title = 'tensor'
    if len(labels) > _MOST_IN_LEGEND:
        title = f'the first {_MOST_IN_LEGEND} of {len(labels)} tensors'
    figure.legend(handles[:_MOST_IN_LEGEND], labels[:_MOST_IN_LEGEND],
                  loc='outside right upper', fontsize='small', title=title)
    figure.savefig(path, dpi=120)


def _layer(name: str) -> str:
    return name.rpartition('/')[0]


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
