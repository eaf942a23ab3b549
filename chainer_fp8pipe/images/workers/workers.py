"""Starts, feeds and ends the worker processes of a rank.

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
from typing import NoReturn

from ..file_list import share
from ..reading import Reader
from .batch_ring import BatchRing
from .worker import RECORD_BYTES, Setting, Task, unpack

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
        [sys.executable, '-m', 'chainer_fp8pipe.images.workers.worker'],
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
