"""Batches of samples: read ahead by worker processes, or here on demand.

Not a ProcessPoolExecutor: its workers hold both ends of their pipe and stay
for ever when the rank is killed (measured with Python 3.11, spawn); it also
runs two threads in the rank, and imports the main script, which starts MPI.
"""
from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from multiprocessing import connection
from typing import NamedTuple, NoReturn

import numpy

from .file_list import share
from .reading import Reader
from .segment import Segment
from .worker import (
    RECORD_BYTES,
    BatchRing,
    Outcome,
    RingLayout,
    Setting,
    Slot,
    Task,
    read_into,
    unpack,
)

_LOOK = 0.2             # seconds between checks that all workers live
_GRACE = 5.0            # seconds that a worker has to finish its sample
_REMEDY = ('with workers=0 the images are read in the rank itself, which '
           'shows what happens')


class WorkerPool:
    """Processes that read samples into slots.

    All take their tasks from one pipe, so that none waits while there is
    work, and report to another.  The rank runs no thread for them.

    Raises:
        ValueError: Transform or decoder cannot be sent to another process.
    """

    def __init__(self, count: int, reader: Reader, slots: BatchRing) -> None:
        # First: if this fails, nothing may be left open.
        means = _pickled(reader.transform, reader.decoder)
        self._pending: deque[Task] = deque()
        self._open: dict[int, int] = {}     # slot: samples still to come
        table, handle = share(reader.table)
        mine, theirs = os.pipe(), os.pipe()     # tasks; results
        # A task wakes several workers, of which one reads it.
        os.set_blocking(mine[0], False)
        os.set_blocking(mine[1], False)
        self._tasks, self._results = mine[1], theirs[0]
        cache = reader.cache
        setting = Setting(
            os.getpid(), mine[0], theirs[1], handle, slots.segment.fd,
            slots.layout, reader.kind,
            None if cache is None else cache.segment.fd,
            reader.seed, means)
        self._processes: list[subprocess.Popen] = []
        self.close = weakref.finalize(
            self, _close, os.getpid(), self._processes, slots,
            [self._tasks, self._results])
        try:
            for _ in range(count):
                self._processes.append(_start(setting))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(mine[0])
            os.close(theirs[1])
            table.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def submit(self, slot: int, samples: int, generation: int) -> None:
        """Starts to fill a slot with the samples that it lists."""
        # Small tasks, so that all workers finish a batch together.
        size = max(1, samples // (8 * len(self._processes)))
        self._open[slot] = samples
        self._pending.extend(
            Task(generation, slot, first, min(size, samples - first))
            for first in range(0, samples, size))
        self._feed()

    def wait(self, slot: int) -> None:
        """Waits until a slot is filled, or its tasks are void."""
        self._check()
        self._feed()
        while self._open[slot]:
            if not self._receive(_LOOK):
                self._check()
            self._feed()
        del self._open[slot]

    def _feed(self) -> None:
        """Writes pending tasks until the pipe is full."""
        with contextlib.suppress(BlockingIOError):
            while self._pending:
                try:
                    os.write(self._tasks, self._pending[0].pack())
                except BrokenPipeError:
                    self._lost()
                self._pending.popleft()

    def _receive(self, seconds: float) -> bool:
        """Reads results; False if none came in this time."""
        if not connection.wait([self._results], seconds):
            return False
        data = os.read(self._results, 256 * RECORD_BYTES)
        if not data:
            self._lost()
        for task in unpack(data):
            self._open[task.slot] -= task.samples
        return True

    def _lost(self) -> NoReturn:
        """Raises, as no worker holds the other end of a pipe."""
        # A process closes its pipes before its exit code is known.
        end = time.monotonic() + _GRACE
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._check()
        raise RuntimeError(
            'the workers of this rank have closed their pipes, but go on; '
            f'{_REMEDY}')

    def _check(self) -> None:
        """Raises if a worker has died."""
        ends = [(number, process.pid, code)
                for number, process in enumerate(self._processes)
                if (code := process.poll()) is not None]
        if ends:
            raise RuntimeError('; '.join(
                f'worker {number} (process {pid}) of this rank {_how(code)}'
                for number, pid, code in ends) + f'; {_REMEDY}')


def _pickled(*means: object) -> bytes:
    for thing in means:
        try:
            if type(thing).__module__ == '__main__':
                raise pickle.PicklingError('it is defined in the main script')
            pickle.dumps(thing)
        except Exception as error:
            raise ValueError(
                f'{thing!r} cannot be sent to workers ({error}); define it '
                'in a module that can be imported, or use workers=0'
                ) from error
    return pickle.dumps(means)


def _start(setting: Setting) -> subprocess.Popen:
    # A new program, not a fork of a rank that has threads.
    process = subprocess.Popen(
        [sys.executable, '-m', 'chainer_fp8pipe.images.worker'],
        stdin=subprocess.PIPE,
        # One thread each, as there are several; imports as in the rank.
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONSAFEPATH': '1',
             'PYTHONPATH': os.pathsep.join(
                 path or os.getcwd() for path in sys.path)},
        pass_fds=[fd for fd in (
            setting.tasks, setting.results, setting.table.fd, setting.slots,
            setting.cache) if fd is not None])
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(pickle.dumps(tuple(setting)))
    return process


def _close(owner: int, processes: list[subprocess.Popen], slots: BatchRing,
           fds: list[int]) -> None:
    """Ends the workers; called at the latest with the pool's life."""
    if os.getpid() != owner:        # a fork of the rank: they are not its own
        return
    slots.generation[0] += 1
    for fd in fds:
        os.close(fd)
    for process in processes:
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _how(code: int) -> str:
    if code >= 0:
        return f'ended with exit code {code}; its own message is above'
    name = signal.Signals(-code).name
    return f'was killed by {name}' + (
        ' (the system does that when memory is short)'
        if name in ('SIGKILL', 'SIGBUS') else '')


# --- batches -----------------------------------------------------------------

# Slots that the training may hold: the batch that is handed out, and the one
# before, which a loop's variable still names.  Further batches are copies.
_HELD = 2


class Failure(NamedTuple):
    """A sample that could not be read."""

    sample: int
    outcome: Outcome
    reason: str


class Loaded(NamedTuple):
    """A batch that has been read."""

    images: numpy.ndarray       # shape (good samples, C, H, W)
    good: numpy.ndarray         # bool: which of all samples were read
    failures: list[Failure]     # the others


class Loader:
    """Reads batches in the order in which they are requested.

    At most ``requests`` of at most ``capacity`` samples are open at a time.
    Without workers this process reads a batch when it is taken.
    """

    def __init__(self, reader: Reader, capacity: int, workers: int,
                 requests: int) -> None:
        assert reader.transform is not None
        self._reader = reader
        layout = RingLayout(
            requests + _HELD, capacity, reader.transform.shape,
            numpy.dtype(reader.transform.dtype))
        self._slots = BatchRing(Segment.create(layout.total_bytes), layout)
        self._free = deque(range(layout.slots))
        self._held: set[int] = set()
        self._open: deque[tuple[int, Slot, int]] = deque()
        self._workers = (WorkerPool(workers, reader, self._slots) if workers
                         else None)

    @property
    def pids(self) -> list[int]:
        return self._workers.pids if self._workers else []

    def request(self, epoch: int, indices: numpy.ndarray) -> None:
        """Starts to read a batch: samples of an epoch, int64."""
        number = self._free.popleft()
        slot = self._slots[number]
        count = len(indices)
        slot.epoch[0] = epoch
        slot.indices[:count] = indices
        self._open.append((number, slot, count))
        if self._workers:
            self._workers.submit(number, count,
                                 int(self._slots.generation[0]))

    def take(self) -> Loaded:
        """The batch of the oldest request; an error if a worker has died."""
        number, slot, count = self._open[0]
        if self._workers:
            self._workers.wait(number)
        else:
            for place in range(count):
                read_into(slot, place, self._reader)
        self._open.popleft()
        good = slot.outcomes[:count] == Outcome.DONE
        failures = [Failure(int(slot.indices[place]),
                            Outcome(slot.outcomes[place]),
                            slot.message(place))
                    for place in numpy.flatnonzero(~good).tolist()]
        return Loaded(self._hand_out(number, slot, good), good, failures)

    def cancel(self) -> None:
        """Gives up all requests."""
        self._slots.generation[0] += 1
        while self._open:
            number, _, _ = self._open.popleft()
            if self._workers:
                self._workers.wait(number)
            self._free.append(number)

    def close(self) -> None:
        """Ends the workers; batches that were taken stay as they are."""
        if self._workers:
            self._workers.close()
        self._slots.segment.close()

    def _hand_out(self, number: int, slot: Slot, good: numpy.ndarray
                  ) -> numpy.ndarray:
        """The good images of a slot, which is freed with them."""
        if len(self._held) == _HELD or not good.all():
            self._free.append(number)
            return slot.images[:len(good)][good]
        self._held.add(number)
        # Parts of this array refer to it, not to what it is a part of.
        weakref.finalize(slot.images, _give_back, number, self._held,
                         self._free).atexit = False
        return slot.images[:len(good)]


def _give_back(number: int, held: set[int], free: deque[int]) -> None:
    held.discard(number)
    free.append(number)
