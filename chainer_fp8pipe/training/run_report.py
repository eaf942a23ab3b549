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
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
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
from ..report.stream import EventStream, Section, events_of, stream_of
from ..report.verdict import TO_STAGES, text
from .extensions.update_marks import CallMark, EveryUpdate, mark_update

_NAME = 'RunReport'
#: Seconds from one write to the next, which double after so many writes; and
#: from one page to the next.
_SECONDS, _OFTEN, _PAGES = 10.0, 256, 60.0
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
    bytes, restarts, and the costliest part of an update.  The page is the file
    ``report.html`` in the result folder.  It shows the verdict, curves, the
    phases of each rank's updates, slow ranks, bytes, and two updates as
    timelines.

    Each rank appends to its file in the folder ``report`` every 10 seconds
    and at the end.  A job that is started again goes on with them, and
    ``python -m chainer_fp8pipe report`` makes pages of them later.  A report
    that cannot be written is a warning.  No messages are sent: the page has
    the ranks whose files are on rank 0's disk.

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
    default_name = _NAME

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
        self._handled, self._error = sys.exc_info()[1], ''
        try:
            self._writer = RecordWriter(self._out, self._rank)
        except OSError as error:
            self._warn(error)
            return
        self._curves = _CurveMeans(updater.iteration)
        self._times = _UpdateTimes(updater, self._rank)
        self._writes, self._next = 0, time.monotonic() + _SECONDS
        self._page_at = time.monotonic() + _PAGES
        ended = json.loads(os.environ.get(ENDED, '[]'))
        self._write([RunStart(
            time.time(), updater.iteration, ranks.size, platform.node(),
            None if grid is None else grid.stage_index, tuple(sys.argv),
            _versions(), _options(updater),
            len(ended) if is_launched() else None, ended[-1] if ended else ''
        )])

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if self._writer is None:
            return
        if not self._rank:
            self._curves.add(trainer)
        if time.monotonic() >= self._next or self._times.updates >= _MOST:
            self._write([*self._curves.take(), *self._times.take()])
            self._writes += 1
            self._next = time.monotonic() + _SECONDS * (
                1 << self._writes // _OFTEN)
            if not self._rank and time.monotonic() >= self._page_at:
                self._page()
                self._page_at = time.monotonic() + _PAGES

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception,
                 tb: Any) -> None:
        self._error = f'{type(exc).__name__}: {exc}'

    def finalize(self) -> None:
        """Ends the record, and prints the verdict."""
        if self._writer is None:
            return
        self._times.end()
        # Such as KeyboardInterrupt, of which a trainer tells nobody.
        found = sys.exc_info()[1]
        if found not in (None, self._handled) and not self._error:
            self._error = f'{type(found).__name__}: {found}'
        self._write([*self._curves.take(), *self._times.take(), RunEnd(
            time.time(), self._updater.iteration, self._error)])
        self._writer = None
        if self._rank:
            return
        if not self._error:
            self._wait_for_others()
        has_page = self._page()
        if self._prints and not self._error:
            with self._warns():
                print(text(read_record(self._out)))
                if has_page:
                    print(f'page: {os.path.join(self._out, has_page)}')

    # --- files ---------------------------------------------------------------

    def _write(self, parts: list[Part]) -> None:
        with self._warns():
            assert self._writer is not None
            self._writer.write(parts)

    def _page(self) -> str | None:
        """Writes the page; its name, None if there is none."""
        if self._filename is None:
            return None
        with self._warns():
            write_page([read_record(self._out)],
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
        self._clear()

    def add(self, trainer: Any) -> None:
        """Takes over what an update and extensions have reported."""
        updater = trainer.updater
        for name, value in trainer.observation.items():
            self._add(name, value)
        if (updater.iteration - self._begin) % self._updates:
            return
        values = {name: total / count for name, (total, count)
                  in self._sums.items()}
        values |= {name: float(value) for name, value
                   in self._summary.compute_mean().items()}
        self._clear()
        if not values:
            return
        self._points.append(CurvePoint(
            updater.iteration, float(getattr(updater, 'epoch_detail', 0.0)),
            trainer.elapsed_time, values, time.time()))
        self._made += 1
        if self._made % _POINTS == 0:
            self._updates *= 2

    def take(self) -> list[CurvePoint]:
        """The points since the last call."""
        points, self._points = self._points, []
        return points

    def _clear(self) -> None:
        # By name, the sum of values on the CPU, and how many there were.
        self._sums: dict[str, tuple[float, int]] = {}
        self._summary = chainer.reporter.DictSummary()

    def _add(self, name: str, value: Any) -> None:
        value = getattr(value, 'array', value)
        if isinstance(value, chainer.backend.cuda.ndarray):
            self._summary.add({name: value})    # is not waited for
            return
        if isinstance(value, (str, bytes)) or numpy.ndim(value):
            return
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):
            return
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1


# --- times of updates --------------------------------------------------------

class _Lap(NamedTuple):
    """The end of an update, and what the stream had counted by then."""

    iteration: int
    end: float
    busy: float                 # from the update's begin to its end
    seconds: dict[str, float]   # by section, since the stream began
    outside: dict[str, float]   # the same when the update began
    hidden: dict[str, float]
    bytes: tuple[int, int, int]     # gradients; to stages: sent, whole


class _UpdateTimes:
    """Notes each update's times, and keeps the events of some updates."""

    def __init__(self, updater: Any, rank: int) -> None:
        self._updater, self._rank = updater, rank
        self._stream = stream_of(updater, *(
            getattr(optimizer, 'communicator', None)
            for optimizer in updater.get_all_optimizers().values()))
        self._begun = updater.iteration
        self._written = self._stream.keep()
        self._sections: _Sections | None = None
        self._before: _Lap | None = None
        self._clear()
        # Of this object alone: a training that never begins leaves nothing.
        self._calls = AroundCalls()
        self._calls.add(updater, 'update', self._update)

    @property
    def updates(self) -> int:
        """Updates since the last :meth:`take`."""
        return len(self._laps)

    def end(self) -> None:
        """Notes nothing any more."""
        self._calls.remove()
        self._stream.keep_no_more(self._written)
        if self._sections is not None:
            self._sections.remove()
            self._sections = None

    def take(self) -> list[Part]:
        """The interval since the last call, and updates with their events."""
        if not self._laps or self._before is None:
            return []
        laps = [self._before, *self._laps]
        steps = numpy.diff([lap.end for lap in laps])
        busy = numpy.array([lap.busy for lap in laps[1:]])
        sections = {name: numpy.array([
            lap.seconds.get(name, 0.0) - lap.outside.get(name, 0.0)
            for lap in laps[1:]]) for name in laps[-1].seconds}
        means = {name: float(values.mean())
                 for name, values in sections.items()}
        # Measuring takes time, too, so that sections may add up to more than
        # the update.
        means['other'] = max(0.0, float(busy.mean()) - sum(means.values()))
        means['between'] = float((steps - busy).mean())
        hidden = {name: (seconds - laps[0].hidden.get(name, 0.0)) / len(steps)
                  for name, seconds in laps[-1].hidden.items()}
        own = busy - sum((sections[name] for name in COMMUNICATION
                          if name in sections), numpy.zeros(len(steps)))
        interval = RankInterval(
            self._rank, laps[1].iteration, laps[-1].iteration,
            _quartiles(steps), _quartiles(own),
            {name: means[name] for name in PHASES if means.get(name)},
            {name: seconds for name, seconds in hidden.items() if seconds},
            _sent(self._updater, *(
                (numpy.array(laps[-1].bytes) - laps[0].bytes) / len(steps))),
            int(bytes_in('VmHWM') or 0), time.time())
        kept = self._regular
        if self._slow and self._slow.seconds > _SLOW * numpy.median(busy):
            kept = [*kept, self._slow]
        self._before = laps[-1]
        self._clear()
        return [interval, *kept]

    def _clear(self) -> None:
        self._laps: list[_Lap] = []
        self._regular: list[RecordedUpdate] = []
        self._slow: RecordedUpdate | None = None

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        if self._sections is None:
            self._sections = _Sections(self._stream, self._updater)
        begin, outside = time.monotonic(), dict(self._stream.seconds)
        yield
        now, stream = time.monotonic(), self._stream
        if self._sections is None:
            return
        self._sections.settle()
        events, iteration = self._events(begin), self._updater.iteration
        lap = _Lap(iteration, now, now - begin, dict(stream.seconds), outside,
                   dict(stream.hidden), (stream.bytes_sent,
                                         stream.stage_bytes,
                                         stream.stage_arrays))
        if self._before is None:
            # The first update connects and allocates: like no other.
            self._before = lap
            return
        self._laps.append(lap)
        count = iteration - self._begun
        made = functools.partial(RecordedUpdate, iteration, now - begin)
        if len(events) > _MOST_EVENTS:
            return
        if not count % _REGULAR and (count // _REGULAR).bit_count() == 1:
            self._regular.append(made(events))
        elif self._slow is None or now - begin > self._slow.seconds:
            self._slow = made(events)

    def _events(self, begin: float) -> tuple[Any, ...]:
        """What was kept of an update, in seconds since 1970."""
        taken = self._written[:]
        # The exchange's thread may have appended meanwhile.
        del self._written[:len(taken)]
        origin = time.monotonic() - time.time()
        found = events_of(taken, self._rank, 0.0)
        return tuple(event._replace(start=event.start - origin,
                                    end=event.end - origin)
                     for event in found if event.end > begin)


class _Sections:
    """Writes down input, passes, exchange and update, until removed.

    A pipeline writes its passes, exchange and update itself.  Elsewhere,
    ``forward`` is the outermost call of an optimizer's model in training, and
    what a loss function computes outside of it is in no section.
    """

    def __init__(self, stream: EventStream, updater: Any) -> None:
        self._stream, self._calls = stream, AroundCalls()
        self._open: list[Section] = []
        self._undo: list[Callable[[], None]] = []
        for iterator in (getattr(updater, '_iterators', None) or {}).values():
            self._watch(iterator, 'input', 'next', '__next__')
        if getattr(updater, 'grid', None) is not None:
            return
        self._watch(chainer.Variable, 'backward', 'backward')
        for optimizer in updater.get_all_optimizers().values():
            self._watch(getattr(optimizer, 'communicator', None), 'exchange',
                        'bcast_data', 'multi_node_mean_grad')
            actual = getattr(optimizer, 'actual_optimizer', optimizer)
            actual.target.add_hook(CallMark(*self._ends_of('forward')), _NAME)
            self._undo += [
                functools.partial(actual.target.delete_hook, _NAME),
                mark_update(actual, _NAME, *self._ends_of('update'))]

    def settle(self) -> None:
        """An update is over: ends what an error has left open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Writes nothing any more."""
        self.settle()
        self._calls.remove()
        while self._undo:
            # A user may have removed the hook as well.
            with contextlib.suppress(KeyError):
                self._undo.pop()()

    def _watch(self, owner: Any, section: str, *methods: str) -> None:
        for name in methods:
            self._calls.add(owner, name,
                            functools.partial(self._stream.section, section))

    def _ends_of(self, name: str) -> tuple[Callable[[], None], ...]:
        """What begins a section, and what ends it."""
        return tuple(functools.partial(act, name)
                     for act in (self._begin, self._end))

    def _begin(self, name: str) -> None:
        section = self._stream.section(name)
        section.__enter__()
        self._open.append(section)

    def _end(self, name: str) -> None:
        # What an error has left open inside of it ends with it.
        while any(section.name == name for section in self._open):
            self._open.pop().__exit__(None, None, None)


def _quartiles(numbers: numpy.ndarray) -> tuple[float, float, float]:
    low, median, high = numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


# --- what a job is, in words -------------------------------------------------

def _sent(updater: Any, gradients: float, to_stages: float, whole: float
          ) -> dict[str, tuple[float, float]]:
    """See :attr:`.RankInterval.sent`, of the mean bytes of an update."""
    found = {}
    communicator = getattr(updater.get_all_optimizers().get('main'),
                           'communicator', None)
    if communicator is not None:
        size = communicator.size
        # Elements of 4 bytes, which go out and come back.
        float32 = 8.0 * (size - 1) / size * _elements(
            updater.get_optimizer('main').target)
        if not isinstance(getattr(communicator, 'events', None), EventStream):
            gradients = float32     # ChainerMN's, which counts nothing
        found[getattr(communicator, 'name', type(communicator).__name__)] = (
            float(gradients), float32)
    if to_stages:
        found[TO_STAGES] = float(to_stages), float(whole)
    return {codec: both for codec, both in found.items() if both[1]}


def _options(updater: Any) -> dict[str, str]:
    """How the training is set up, in words."""
    found = {'updater': type(updater).__name__}
    for name, optimizer in updater.get_all_optimizers().items():
        suffix = '' if name == 'main' else f' {name}'
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        found[f'optimizer{suffix}'] = type(actual).__name__
        found[f'hyperparameters{suffix}'] = ', '.join(
            f'{key}={number(value)}' for key, value
            in sorted(actual.hyperparam.get_dict().items())
            if isinstance(value, (int, float)))
        target = actual.target
        found[f'model{suffix}'] = (
            f'{type(target).__name__}, {_elements(target):,} parameters')
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None:
            found[f'communicator{suffix}'] = getattr(
                communicator, 'name', type(communicator).__name__)
            if hasattr(communicator, 'options'):
                found |= {option: str(value) for option, value
                          in vars(communicator.options).items()
                          if option != 'name'}
    if (schedule := getattr(updater, 'schedule', None)) is not None:
        found |= {'schedule': schedule.name, 'stages': str(schedule.stages),
                  'micro-batches': str(schedule.micro_batches)}
    if (grid := getattr(updater, 'grid', None)) is not None:
        found['replicas'] = str(grid.replicas)
    for name, iterator in getattr(updater, '_iterators', {}).items():
        found[f'iterator {name}'] = type(iterator).__name__
        if isinstance(getattr(iterator, 'batch_size', None), int):
            found[f'batch of a rank, {name}'] = str(iterator.batch_size)
    return found


def _elements(target: Any) -> int:
    return sum(math.prod(parameter.shape) for parameter in target.params()
               if parameter.array is not None)


def _versions() -> dict[str, str]:
    found = {'Python': platform.python_version(),
             'chainer_fp8pipe': __version__, 'chainer': chainer.__version__}
    for name in 'numpy', 'mpi4py', 'cupy':
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found['MPI'] = MPI.Get_library_version().replace('\0', '').split('\n')[0]
    return found
