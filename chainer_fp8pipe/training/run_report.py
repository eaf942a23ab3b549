"""``RunReport``: what a run does, in one page that is written as it goes."""
# After each update a rank notes its times, and rank 0 what was reported; now
# and then a rank writes what it has to a file of its own (report/record.py).
# There are no messages: a rank without the extension, one that fails, or one
# that is late makes nobody wait.  So ranks must choose alike without a word:
# events are kept of updates whose numbers double, and of slow ones, which are
# slow on all ranks.
#
# Nothing here ends a training, but for what a user can mend at once: somebody
# else's file in the record's place.
from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import chainer
import mpi4py
import numpy
from chainer.training import extension
from mpi4py import MPI

from .._version import __version__
from ..intercept.patching import AroundCalls
from ..mpi import all_ranks
from ..report.launch_protocol import ENDED, is_launched
from ..report.page import write_page
from ..report.quantities import bytes_in, number
from ..report.record import (
    COMMUNICATION,
    PHASES,
    CurvePoint,
    Part,
    RankInterval,
    RecordedUpdate,
    RecordWriter,
    RunEnd,
    RunStart,
    read_record,
)
from ..report.stream import EventStream, events_of, stream_of
from ..report.verdict import TO_STAGES, text
from .triggers import EveryUpdate

#: Seconds from one write to the next, at least, and from one page to the next;
#: and the share of the time so far, so that the files of long runs stay small.
_SECONDS, _PAGES, _SHARE = 10.0, 60.0, 1 / 256
#: Updates whose times are kept until they are written, at most.
_MOST = 10_000
#: The events of an update are kept if it is the so-many-th of a start, twice,
#: four times, ...; or if it takes so many times the median.
_REGULAR, _SLOW = 5, 1.25
#: An update with more events is too long for a picture.
_MOST_EVENTS = 5_000
#: Points of one start before they become means of twice as many updates.
_POINTS = 500
#: Seconds that rank 0 waits for the other ranks' last lines.
_PATIENCE = 2.0


class RunReport(extension.Extension):
    """Records a run, prints its verdict, and writes a page about it.

    Add it on all ranks, with any updater::

        trainer.extend(RunReport(comm))

    At the end rank 0 prints the verdict: final loss and accuracy, times,
    bytes, restarts, and the costliest part of an update.  ``report.html`` in
    the result folder also has curves, the phases of each rank's updates, slow
    ranks, and two updates as timelines.

    Each rank appends to a file in the folder ``report`` every 10 seconds and
    at the end, also where a job is started again.  A report that cannot be
    written is a warning.  No messages are sent: the page has the ranks whose
    files are on rank 0's disk.

    Args:
        comm: All ranks: a communicator of this package, ChainerMN's or
            mpi4py's, or a ``ProcessGrid``; None: ``MPI.COMM_WORLD``.  Of a
            :class:`PipelineUpdater`, those of its grid are taken.
        filename: Of the page; None for none, the record only.
        prints: Whether rank 0 prints the verdict.
        directory: The result folder; None: the trainer's ``out``.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: When the training begins: another file is in the record's
            place, or the trainer has a RunReport already.
    """

    trigger = EveryUpdate()
    # After all that reports values and writes files.
    priority = extension.PRIORITY_READER - 50
    default_name = 'RunReport'

    def __init__(self, comm: Any = None, filename: str | None = 'report.html',
                 prints: bool = True, directory: str | None = None) -> None:
        self._ranks = MPI.COMM_WORLD if comm is None else all_ranks(comm)
        if not isinstance(self._ranks, MPI.Comm):
            raise TypeError(
                'RunReport needs a communicator of this package, ChainerMN '
                f'or mpi4py, or a ProcessGrid, not {comm!r}')
        self._filename, self._prints = filename, prints
        self._directory = directory
        self._writer: RecordWriter | None = None
        self._warned = False

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        if any(isinstance(entry.extension, RunReport)
               and entry.extension is not self
               for entry in trainer._extensions.values()):
            raise ValueError('the trainer has RunReport twice, which would '
                             'write the same files; extend it with one')
        updater = trainer.updater
        grid = getattr(updater, 'grid', None)
        ranks = self._ranks if grid is None else grid.comm
        self._rank, self._updater = ranks.rank, updater
        self._out = (trainer.out if self._directory is None
                     else self._directory)
        # What is being handled now is not what will end the training.
        self._handled = sys.exc_info()[1]
        try:
            self._writer = RecordWriter(self._out, self._rank)
        except OSError as error:
            self._warn(error)
            return
        self._curves = _CurveMeans(updater.iteration)
        self._times = _UpdateTimes(updater, self._rank)
        self._began = time.monotonic()
        self._next, self._page_at = self._began + _SECONDS, (
            self._began + _PAGES)
        ended = json.loads(os.environ.get(ENDED, '[]'))
        self._write([RunStart(
            time.time(), updater.iteration, ranks.size, platform.node(),
            None if grid is None else grid.stage_index, tuple(sys.argv),
            {'Python': platform.python_version(),
             'chainer_fp8pipe': __version__, 'chainer': chainer.__version__,
             'numpy': numpy.__version__, 'mpi4py': mpi4py.__version__,
             'MPI': MPI.Get_library_version().strip('\0').split('\n')[0]},
            _options(updater), len(ended) if is_launched() else None,
            ended[-1] if ended else '')])

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._writer is None:
            return
        now = time.monotonic()
        if not self._rank:
            self._curves.add(trainer)
        if now >= self._next or self._times.updates >= _MOST:
            self._write([*self._curves.take(), *self._times.take()])
            self._next = now + max(_SECONDS, _SHARE * (now - self._began))
            if not self._rank and now >= self._page_at:
                self._page()
                self._page_at = now + _PAGES

    def finalize(self) -> None:
        """Ends the record, and prints the verdict."""
        if self._writer is None:
            return
        self._times.end()
        found = sys.exc_info()[1]
        error = '' if found in (None, self._handled) else (
            f'{type(found).__name__}: {found}')
        self._write([*self._curves.take(), *self._times.take(), RunEnd(
            time.time(), self._updater.iteration, error)])
        self._writer = None
        if self._rank:
            return
        if not error:
            self._wait_for_others()
        has_page = self._page()
        if self._prints and not error:
            with self._warns():
                print(text(read_record(self._out)))
                if has_page:
                    print(f'page: {os.path.join(self._out, has_page)}')

    def _write(self, parts: list[Part]) -> None:
        with self._warns():
            assert self._writer is not None
            self._writer.write(parts)

    def _page(self) -> str | None:
        """Writes the page; its name, None if there is none."""
        if self._filename is None:
            return None
        with self._warns():
            write_page(read_record(self._out),
                       os.path.join(self._out, self._filename))
            return self._filename
        return None

    def _wait_for_others(self) -> None:
        """Until the last lines of ranks that write to this disk are there."""
        until = time.monotonic() + _PATIENCE
        with self._warns():
            while time.monotonic() < until:
                record = read_record(self._out)
                if record.ended >= record.hosts.keys():
                    return
                time.sleep(0.1)

    @contextlib.contextmanager
    def _warns(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f'the report of this run cannot be written on rank '
                f'{self._rank}, and the training goes on: '
                f'{type(error).__name__}: {error}', RuntimeWarning,
                stacklevel=3)


# --- what was reported -------------------------------------------------------

class _CurveMeans:
    """Makes points of the values that updates report.

    At first each update is a point.  As points become many, a point is the
    mean over two updates, then over four, and so on.
    """

    def __init__(self, iteration: int) -> None:
        self._begin, self._updates, self._made = iteration, 1, 0
        self._points: list[CurvePoint] = []
        self._summary = chainer.reporter.DictSummary()

    def add(self, trainer: Any) -> None:
        """Takes over what an update and extensions have reported."""
        updater = trainer.updater
        for name, value in trainer.observation.items():
            value = getattr(value, 'array', value)
            # What is on a GPU is not waited for.
            if not isinstance(value, chainer.get_array_types()):
                with contextlib.suppress(ValueError):   # of several shapes
                    value = numpy.asarray(value)
            if getattr(value, 'ndim', 1) == 0 and value.dtype.kind in 'biuf':
                self._summary.add({name: float(value) if isinstance(
                    value, numpy.ndarray) else value})
        if (updater.iteration - self._begin) % self._updates:
            return
        values = {name: float(value) for name, value
                  in self._summary.compute_mean().items()}
        self._summary = chainer.reporter.DictSummary()
        if values:
            self._points.append(CurvePoint(
                updater.iteration,
                float(getattr(updater, 'epoch_detail', 0.0)),
                trainer.elapsed_time, values, time.time()))
            self._made += 1
            if self._made % _POINTS == 0:
                self._updates *= 2

    def take(self) -> list[CurvePoint]:
        """The points since the last call."""
        points, self._points = self._points, []
        return points


# --- times of updates --------------------------------------------------------

class _Lap(NamedTuple):
    """An update: its end, and seconds, all of them and by section."""

    iteration: int
    end: float
    busy: float
    seconds: dict[str, float]


class _UpdateTimes:
    """Notes each update's times, and keeps the events of some updates."""

    def __init__(self, updater: Any, rank: int) -> None:
        self._updater, self._rank = updater, rank
        self._stream = stream_of(updater, *(
            getattr(optimizer, 'communicator', None)
            for optimizer in updater.get_all_optimizers().values()))
        self._begun, self._kept = updater.iteration, self._stream.keep()
        # The end of the last update of the interval before, and what the
        # stream had counted by then.
        self._end, self._counted = 0.0, dict[str, float]()
        self._clear()
        # Of this object alone: a training that never begins leaves nothing.
        self._calls = AroundCalls()
        self._calls.add(updater, 'update', self._update)

    def _clear(self) -> None:
        self._laps: list[_Lap] = []
        self._regular: list[RecordedUpdate] = []
        self._slow: RecordedUpdate | None = None

    @property
    def updates(self) -> int:
        """Updates since the last :meth:`take`."""
        return len(self._laps)

    def end(self) -> None:
        """Notes nothing any more."""
        self._calls.remove()
        self._stream.keep_no_more(self._kept)

    def take(self) -> list[Part]:
        """The interval since the last call, and updates with their events."""
        laps, before, now = self._laps, self._counted, self._counts()
        if not laps:
            return []
        steps = numpy.diff([self._end, *(lap.end for lap in laps)])
        busy = numpy.array([lap.busy for lap in laps])
        sections = {name: numpy.array([lap.seconds.get(name, 0.0)
                                       for lap in laps])
                    for name in PHASES}
        # Measuring takes time, too, so that sections may add up to more than
        # the update.
        sections['other'] = numpy.maximum(0.0, busy - sum(sections.values()))
        sections['between'] = steps - busy
        means = {name: float(values.mean())
                 for name, values in sections.items()}
        hidden = {name: (now[name] - before.get(name, 0.0)) / len(laps)
                  for name in now if name in PHASES}
        parts: list[Part] = [RankInterval(
            self._rank, laps[0].iteration, laps[-1].iteration,
            _quartiles(steps), _quartiles(
                busy - sum(sections[name] for name in COMMUNICATION)),
            {name: mean for name, mean in means.items() if mean},
            {name: seconds for name, seconds in hidden.items() if seconds},
            _sent(self._updater, *(
                (now[name] - before[name]) / len(laps) for name in _BYTES)),
            int(bytes_in('VmHWM') or 0), time.time()), *self._regular]
        if self._slow and self._slow.seconds > _SLOW * numpy.median(busy):
            parts.append(self._slow)
        self._end, self._counted = laps[-1].end, now
        self._clear()
        return parts

    def _counts(self) -> dict[str, float]:
        """What the stream has counted: hidden seconds, and bytes."""
        return {**self._stream.hidden, **{
            name: getattr(self._stream, name) for name in _BYTES}}

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        if not self._end:
            _watch(self._calls, self._stream, self._updater)
        begin, before = time.monotonic(), dict(self._stream.seconds)
        yield
        end, iteration = time.monotonic(), self._updater.iteration
        taken = self._kept[:]
        # The exchange's thread may have appended meanwhile.
        del self._kept[:len(taken)]
        if not self._end:
            # The first update connects and allocates: like no other.
            self._end, self._counted = end, self._counts()
            return
        self._laps.append(_Lap(iteration, end, end - begin, {
            name: seconds - before.get(name, 0.0)
            for name, seconds in self._stream.seconds.items()}))
        count = iteration - self._begun
        is_regular = not count % _REGULAR and (
            count // _REGULAR).bit_count() == 1
        if len(taken) <= _MOST_EVENTS and (
                is_regular or self._slow is None
                or end - begin > self._slow.seconds):
            origin = time.monotonic() - time.time()
            made = RecordedUpdate(iteration, end - begin, tuple(
                event._replace(start=event.start - origin,
                               end=event.end - origin)
                for event in events_of(taken, self._rank, 0.0)
                if event.end > begin))
            if is_regular:
                self._regular.append(made)
            else:
                self._slow = made


_BYTES = 'bytes_sent', 'stage_bytes', 'stage_arrays'


def _watch(calls: AroundCalls, stream: EventStream, updater: Any) -> None:
    """Writes down input, passes, exchange and update.

    A pipeline writes its passes, exchange and update itself.  Elsewhere,
    ``forward`` is the call of an optimizer's model, and ``update`` what else
    the optimizer does.
    """
    def watch(owner: Any, section: str, *methods: str) -> None:
        for name in methods:
            calls.add(owner, name, functools.partial(stream.section, section))
    for iterator in (getattr(updater, '_iterators', None) or {}).values():
        watch(iterator, 'input', 'next', '__next__')
    if getattr(updater, 'grid', None) is not None:
        return
    watch(chainer.Variable, 'backward', 'backward')
    for optimizer in updater.get_all_optimizers().values():
        watch(getattr(optimizer, 'communicator', None), 'exchange',
              'bcast_data', 'multi_node_mean_grad')
        watch(optimizer.target, 'forward', '__call__')
        watch(getattr(optimizer, 'actual_optimizer', optimizer), 'update',
              'update')


def _quartiles(numbers: numpy.ndarray) -> tuple[float, float, float]:
    low, median, high = numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def _sent(updater: Any, gradients: float, to_stages: float, whole: float
          ) -> dict[str, tuple[float, float]]:
    """See :attr:`.RankInterval.sent`, of the mean bytes of an update."""
    found = {TO_STAGES: (float(to_stages), float(whole))}
    optimizer = updater.get_all_optimizers().get('main')
    communicator = getattr(optimizer, 'communicator', None)
    if communicator is not None:
        size = communicator.size
        # Elements of 4 bytes, which go out and come back.
        float32 = 8.0 * (size - 1) / size * _elements(optimizer.target)
        if not isinstance(getattr(communicator, 'events', None), EventStream):
            gradients = float32     # ChainerMN's, which counts nothing
        found[_name_of(communicator)] = float(gradients), float32
    return {codec: both for codec, both in found.items() if both[1]}


def _options(updater: Any) -> dict[str, str]:
    """How the training is set up, in words."""
    found = {'updater': type(updater).__name__}
    for name, optimizer in updater.get_all_optimizers().items():
        suffix = '' if name == 'main' else f' {name}'
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        found[f'optimizer{suffix}'] = ', '.join([type(actual).__name__, *(
            f'{key}={number(value)}' for key, value
            in sorted(actual.hyperparam.get_dict().items())
            if isinstance(value, (int, float)))])
        found[f'model{suffix}'] = (f'{type(actual.target).__name__}, '
                                   f'{_elements(actual.target):,} parameters')
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None:
            found[f'communicator{suffix}'] = _name_of(communicator)
            if hasattr(communicator, 'options'):
                found |= {option: str(value) for option, value
                          in vars(communicator.options).items()
                          if option != 'name'}
    if (schedule := getattr(updater, 'schedule', None)) is not None:
        found |= {'schedule': schedule.name, 'stages': str(schedule.stages),
                  'micro-batches': str(schedule.micro_batches)}
    return found


def _name_of(communicator: Any) -> str:
    return getattr(communicator, 'name', type(communicator).__name__)


def _elements(target: Any) -> int:
    return sum(math.prod(parameter.shape) for parameter in target.params()
               if parameter.array is not None)
