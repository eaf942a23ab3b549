"""``RunReport``: what a run does, in a record and a page about it."""
# After each update a rank notes its times, and rank 0 what was reported; now
# and then a rank writes what it has to a file of its own (report/record.py).
# There are no messages: a rank without the extension, one that fails, or one
# that is late makes nobody wait.  So ranks choose alike without a word whose
# events to keep: of updates whose numbers double.
from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import chainer
import mpi4py
import numpy
from chainer.training import extension
from mpi4py import MPI

from .._version import __version__
from ..intercept.patching import AroundCalls
from ..mpi.grid import ranks_in
from ..report import record
from ..report.launch_protocol import EARLIER
from ..report.page import write_page
from ..report.stream import EventStream, events_of, stream_of
from ..report.verdict import TO_STAGES, text

#: Seconds from one write to the next, at least, and the share of the time so
#: far, so that the files of long runs stay small.
_SECONDS, _SHARE = 10.0, 1 / 256
#: The events of an update are kept if it is the so-many-th of a start, twice,
#: four times, ..., unless they are too many for a picture.
_REGULAR, _MOST_EVENTS = 5, 5_000
#: Updates after which a point of the curves is the mean of two, then three.
_POINTS = 500
#: Seconds that rank 0 waits for the other ranks' last lines.
_PATIENCE = 2.0


class RunReport(extension.Extension):
    """Records a run, prints its verdict, and writes a page about it.

    Add it on all ranks, with any updater::

        trainer.extend(RunReport(comm))

    At the end rank 0 prints the verdict: final loss and accuracy, times,
    bytes, restarts, and the costliest part of an update.  ``report.html`` also
    has curves, the phases of each rank's updates, slow ranks, and an update as
    timeline: of the ranks whose files are on rank 0's disk.

    Each rank appends to a file in the folder ``report``, also where a job is
    started again; ``python -m chainer_fp8pipe report`` makes the page of a run
    that goes on or was killed.  A report that cannot be written is a warning.

    Args:
        comm: All ranks, as of :class:`Snapshot`; of a
            :class:`PipelineUpdater`, those of its grid are taken.
        filename: Of the page; None for none, the record only.
        directory: The result folder; None: the trainer's ``out``.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: When the training begins: another file is in the record's
            place, or the trainer has a RunReport already.
    """

    # Has no state: snapshots do not know the extension.
    trigger = staticmethod(lambda trainer: True)
    # After all that reports values and writes files.
    priority = extension.PRIORITY_READER - 50
    default_name = 'RunReport'

    def __init__(self, comm: Any = None, filename: str | None = 'report.html',
                 directory: str | None = None) -> None:
        self._ranks = ranks_in(comm)
        self._filename, self._given = filename, directory
        self._warned = False

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        if sum(isinstance(entry.extension, RunReport)
               for entry in trainer._extensions.values()) > 1:
            raise ValueError('the trainer has RunReport twice, which would '
                             'write the same files; extend it with one')
        updater = trainer.updater
        self._ranks = ranks_in(getattr(updater, 'grid', self._ranks))
        self._out = self._given or trainer.out
        # What is being handled now is not what will end the training.
        self._handled = sys.exc_info()[1]
        self._writer: record.RecordWriter | None = None
        with self._warns(OSError):
            self._writer = record.RecordWriter(self._out, self._ranks.rank)
        self._parts: list[record.Part] = [         # what will be written next
            _start(updater, self._ranks.size)]
        self._updater = updater
        # What was reported since the last point of the curves.
        self._values = chainer.reporter.DictSummary()
        self._begun = self._drawn = updater.iteration
        self._steps = _Steps(updater, self._parts, self._ranks.rank)
        self._write()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if not self._ranks.rank:
            self._add(trainer.observation)
        if time.monotonic() >= self._last + max(
                _SECONDS, _SHARE * trainer.elapsed_time):
            self._write()

    def finalize(self) -> None:
        """Ends the record, and prints the verdict."""
        self._steps.calls.close()
        found = sys.exc_info()[1]
        error = '' if found in (None, self._handled) else (
            f'{type(found).__name__}: {found}')
        self._draw()
        self._write(record.RunEnd(
            time.time(), self._updater.iteration, error))
        if not self._ranks.rank:
            with self._warns(Exception):
                self._show(error)

    def _add(self, observation: dict[str, Any]) -> None:
        """Adds what an update has reported, and may draw a point."""
        for name, value in observation.items():
            value = getattr(value, 'array', value)
            # What is no number is left out; a GPU is not waited for.
            if getattr(value, 'ndim', 0) == 0:
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    self._values.add({name: value if isinstance(
                        value, chainer.backends.cuda.ndarray)
                        else float(value)})
        iteration = self._updater.iteration
        if iteration - self._drawn > (iteration - self._begun) // _POINTS:
            self._draw()

    def _draw(self) -> None:
        """The point of the curves since the last one, if there is one."""
        if means := self._values.compute_mean():
            self._values = chainer.reporter.DictSummary()
            self._drawn = self._updater.iteration
            self._parts.append(record.CurvePoint(
                time.time(), self._drawn,
                float(getattr(self._updater, 'epoch_detail', 0.0)),
                {name: float(value) for name, value in means.items()}))

    def _show(self, error: str) -> None:
        # Until the last lines of ranks that write to this disk are there.
        until = time.monotonic() + _PATIENCE * (not error)
        while (found := record.read_record(self._out)).ended < (
                found.hosts.keys()) and time.monotonic() < until:
            time.sleep(0.1)
        if not error:
            print(text(found))
        if self._filename is not None:
            page = os.path.join(self._out, self._filename)
            write_page(found, page)
            print(f'page: {page}')

    @contextlib.contextmanager
    def _warns(self, kind: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    'the report of this run cannot be written on rank '
                    f'{self._ranks.rank}, and the training goes on: '
                    f'{type(error).__name__}: {error}', RuntimeWarning,
                    stacklevel=3)

    def _write(self, *more: record.Part) -> None:
        """Writes what there is, with the updates since the last call."""
        self._steps.sum_up()
        with self._warns(OSError):
            if self._writer:
                self._writer.write([*self._parts, *more])
        self._parts.clear()
        self._last = time.monotonic()


class _Steps:
    """The times of updates and their sections, and events of some of them."""

    def __init__(self, updater: Any, parts: list[record.Part], rank: int
                 ) -> None:
        self._updater, self._parts, self._rank = updater, parts, rank
        self._begun = updater.iteration
        # Of updates since the last interval: seconds without COMMUNICATION,
        # and sums of those by section.
        self._own: list[float] = []
        self._spent = Counter[Any]()
        self._stream = stream_of(updater, *(
            one for _, one in _communicators(updater)))
        # When the last update ended, and what had been counted by the last
        # interval.
        self._end, self._counted = 0.0, self._counts()
        self.calls = AroundCalls()      # until it is closed
        self.calls.add(updater, 'update', self._timed)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Times an update and its sections, and may keep its events."""
        if not self._end:
            _watch(self.calls, self._stream, self._updater)
        stream, iteration = self._stream, self._updater.iteration + 1
        count, over = divmod(iteration - self._begun, _REGULAR)
        kept = [] if over or count.bit_count() != 1 else stream.keep()
        begin, before = time.monotonic(), stream.seconds.copy()
        try:
            yield
        finally:
            stream.keep_no_more(kept)
        end = time.monotonic()
        if not self._end:
            # The first update connects and allocates: like no other.
            self._end, self._counted = end, self._counts()
            return
        spent = {name: seconds - before[name]
                 for name, seconds in stream.seconds.items()}
        self._own.append(end - begin - sum(
            spent.get(name, 0.0) for name in record.COMMUNICATION))
        # Measuring takes time, too, so that sections may add up to more than
        # the update.
        spent |= {'other': max(0.0, end - begin - sum(spent.values())),
                  'between': begin - self._end}
        self._spent.update({('phases', name): seconds
                            for name, seconds in spent.items()})
        self._end = end
        if kept and len(kept) <= _MOST_EVENTS:
            origin = time.monotonic() - time.time()
            self._parts.append(record.RecordedUpdate(
                begin - origin, iteration, end - begin,
                tuple(events_of(kept, self._rank, origin))))

    def _counts(self) -> Any:
        """What was counted so far: hidden seconds, and bytes by codec."""
        stream = self._stream
        found: Any = Counter({('hidden', name): seconds for name, seconds
                              in stream.hidden.items()})
        found['sent', TO_STAGES] = stream.stage_bytes
        found['float32', TO_STAGES] = stream.stage_arrays
        seen = set[EventStream]()
        for optimizer, communicator in _communicators(self._updater):
            name, size = _name_of(communicator), communicator.size
            # Elements of 4 bytes, which go out and come back.
            whole = optimizer.t * 8.0 * (size - 1) / size * (
                _elements(optimizer))
            found['float32', name] += whole
            own = getattr(communicator, 'events', None)
            if own is None:     # ChainerMN's counts nothing
                found['sent', name] += whole
            elif own not in seen:
                seen.add(own)
                found['sent', name] += own.bytes_sent
        return found

    def sum_up(self) -> None:
        """The updates since the last call, if there are some."""
        if not self._own:
            return
        updates, last = len(self._own), self._updater.iteration
        own, now = numpy.quantile(self._own, [0.25, 0.5]), self._counts()
        grown = {kind: {
            name: count / updates for (one, name), count
            in (self._spent + now - self._counted).items() if one == kind}
            for kind in ('phases', 'hidden', 'sent', 'float32')}
        self._own, self._counted = [], now
        self._spent.clear()
        self._parts.append(record.RankInterval(
            time.time(), self._rank, last - updates + 1, last,
            tuple(own.tolist()), **grown))


def _start(updater: Any, ranks: int) -> record.RunStart:
    """What is known of a start before its first update."""
    optimizer = next(iter(updater.get_all_optimizers().values()))
    settings = {
        'command': ' '.join(map(str, sys.argv)),
        'updater': type(updater).__name__,
        'optimizer': type(getattr(
            optimizer, 'actual_optimizer', optimizer)).__name__,
        'model': f'{type(optimizer.target).__name__}, '
                 f'{_elements(optimizer):,} parameters'}
    if (communicator := getattr(optimizer, 'communicator', None)):
        settings |= {'communicator': _name_of(communicator), **{
            option: str(value) for option, value in getattr(getattr(
                communicator, 'options', None), '__dict__', {}).items()
            if option != 'name'}}
    if (schedule := getattr(updater, 'schedule', None)) is not None:
        settings |= {'schedule': schedule.name, 'stages': str(schedule.stages),
                    'micro-batches': str(schedule.micro_batches)}
    earlier = os.environ.get(EARLIER)
    return record.RunStart(
        time.time(), updater.iteration, ranks, platform.node(),
        getattr(getattr(updater, 'grid', None), 'stage_index', None), {
            **settings, 'Python': platform.python_version(),
            'chainer_fp8pipe': __version__, **{
                one.__name__: one.__version__
                for one in (chainer, numpy, mpi4py)},
            'MPI': MPI.Get_library_version().strip('\0').split('\n')[0]},
        None if earlier is None else int(earlier))


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


def _communicators(updater: Any) -> list[tuple[Any, Any]]:
    """The optimizers that have communicators, and these."""
    return [(optimizer, optimizer.communicator) for optimizer
            in updater.get_all_optimizers().values()
            if getattr(optimizer, 'communicator', None) is not None]


def _name_of(communicator: Any) -> str:
    return getattr(communicator, 'name', type(communicator).__name__)


def _elements(optimizer: Any) -> int:
    return sum(parameter.size for parameter in optimizer.target.params()
               if parameter.array is not None)
