"""Batches of samples: read ahead by worker processes, or here on demand."""
# A rank puts the samples of a batch into a slot of a ring in shared memory
# (Ring), and workers fill it with images:
#
#     rank                          pipe, ring                    workers
#     request(epoch, samples)   --- tasks ------------------->    work()
#     take()                    <-- the tasks that are done ---   _fill()
#
# All workers take their tasks from one pipe, so that none waits while there
# is work, and report to another.  Only numbers cross the pipes; pixels are
# written where the batch is read.  The rank runs no thread for its workers,
# and finds a dead one when it waits for a batch.
#
# A worker is a new program, not a fork: ranks have threads, and memory that is
# registered with the network card.  It imports neither Chainer nor MPI.  It
# ends with the rank, even by SIGKILL: the pipe of tasks has no writer then.
# Not a ProcessPoolExecutor: its workers hold both ends of their pipe and stay
# for ever when the rank is killed (measured with Python 3.11, spawn); it also
# runs two threads in the rank, and imports the main script, which starts MPI.
# Threads in place of processes: 845 against 1,361 images/s, by the GIL.
from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from multiprocessing import connection
from typing import Any, NoReturn

import numpy

from .decoding import ImageError
from .memory import Segment
from .reading import FileTable, Reader

#: How reading a sample ended: well; the image cannot be used; the file cannot
#: be read; something else, most likely in the transform.
DONE, BAD_IMAGE, BAD_FILE, MISTAKE = range(4)

#: A sample that could not be read, one of the above, and why.
Failure = tuple[int, int, str]

_PAGE = 4096            # images start on one, as a GPU's driver likes it
_MESSAGE = 1024         # bytes of an error's text that are kept: its end
# Generation, slot, first place in the slot, samples.  Few enough bytes to
# cross a pipe in one piece.
_TASK = struct.Struct('=qqqq')
_LOOK = 0.2             # seconds between checks that all workers live
_PATIENCE = 1.0         # seconds between checks that the rank lives
_GRACE = 5.0            # seconds that a worker has to finish its sample
# Slots that the training may hold: the batch that is handed out, and the one
# before, which a loop's variable still names.  Further batches are copies.
_HELD = 2
_REMEDY = ('with workers=0 the images are read in the rank itself, which '
           'shows what happens')


class Ring:
    """Slots for batches, in shared memory.

    Its pickle is for children that inherit the memory's descriptor.

    Args:
        slots: How many.
        capacity: Samples in a slot.
        shape: Of an image: (C, H, W).
        dtype: Of an image.
        segment: The memory; by default new.
    """

    def __init__(self, slots: int, capacity: int, shape: tuple[int, ...],
                 dtype: numpy.dtype, segment: Segment | None = None) -> None:
        self._layout = slots, capacity, shape, dtype
        head = numpy.dtype([
            ('epoch', 'i8'), ('samples', 'i8', (capacity,)),
            ('outcomes', 'i8', (capacity,)),
            ('messages', f'S{_MESSAGE}', (capacity,))])
        self._images = _pages(8 + slots * head.itemsize)
        self._slot_bytes = _pages(
            capacity * math.prod(shape) * dtype.itemsize)
        self.segment = segment or Segment.create(
            self._images + slots * self._slot_bytes)
        # Tasks of an earlier generation are void.
        self.generation = self.segment.array(0, (1,), numpy.int64)
        #: Of each slot: its epoch, and a row for each sample.
        self.heads = self.segment.array(8, (slots,), head)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (*self._layout, self.segment)

    def images(self, slot: int) -> numpy.ndarray:
        """A new array; the slot is in use while it, or a part, lives."""
        _, capacity, shape, dtype = self._layout
        return self.segment.array(self._images + slot * self._slot_bytes,
                                  (capacity, *shape), dtype)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def attempt(reader: Reader, sample: int, epoch: int, out: numpy.ndarray
            ) -> tuple[int, str]:
    """Reads a sample into ``out``; returns how it went, and why."""
    try:
        reader.read(sample, epoch, out)
    except ImageError as error:
        return BAD_IMAGE, error.reason
    except OSError as error:
        return BAD_FILE, f'{type(error).__name__}: {error}'
    except Exception:
        return MISTAKE, traceback.format_exc()
    return DONE, ''


def _fill(ring: Ring, slot: int, places: range, generation: int,
          reader: Reader) -> None:
    """Reads some samples of a slot, unless they are void."""
    head, images = ring.heads[slot], ring.images(slot)
    for place in places:
        if ring.generation[0] != generation:
            return
        outcome, reason = attempt(reader, int(head['samples'][place]),
                                  int(head['epoch']), images[place])
        head['outcomes'][place] = outcome
        if reason:
            head['messages'][place] = reason.encode(
                errors='replace')[-_MESSAGE:]


# --- in a worker -------------------------------------------------------------

def work() -> None:
    """Reads what a rank says at the start, then does tasks until it is gone.

    The rank starts ``python -c`` with this, and sends arguments through the
    standard input; file descriptors are inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the rank decides
    parent, tasks, results, table, arguments, ring = pickle.load(
        sys.stdin.buffer)
    reader = Reader(FileTable.open(*table), *arguments)
    while data := _next_task(tasks, parent):
        generation, slot, first, samples = _TASK.unpack(data)
        _fill(ring, slot, range(first, first + samples), generation, reader)
        try:
            os.write(results, data)
        except BrokenPipeError:
            return


def _next_task(tasks: int, parent: int) -> bytes:
    """Waits for a task; b'' if the rank is gone."""
    while True:
        connection.wait([tasks], _PATIENCE)
        try:
            return os.read(tasks, _TASK.size)
        except BlockingIOError:         # another worker was faster
            # A fork of the rank may still hold the pipe.
            if os.getppid() != parent:
                return b''


# --- in the rank -------------------------------------------------------------

class Loader:
    """Reads batches in the order in which they are requested.

    Args:
        reader: Has a transform.
        capacity: Most samples of a batch.
        workers: Processes; without any this one reads a batch when it is
            taken.
        requests: Most batches that are requested and not taken.

    Raises:
        ValueError: Transform or decoder cannot be sent to another process.
    """

    def __init__(self, reader: Reader, capacity: int, workers: int,
                 requests: int) -> None:
        assert reader.transform is not None
        self._reader = reader
        if workers:     # first: if this fails, nothing may be left open
            _check_means(reader.transform, reader.decoder)
        self._ring = Ring(requests + _HELD, capacity, reader.transform.shape,
                          numpy.dtype(reader.transform.dtype))
        self._free = deque(range(requests + _HELD))
        self._held: set[int] = set()
        self._requests: deque[tuple[int, int]] = deque()    # slot, samples
        self._pending: deque[bytes] = deque()   # tasks, not in the pipe yet
        self._open: dict[int, int] = {}         # slot: samples still to come
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[int] = []             # tasks, results
        #: Ends the workers; batches that were taken stay as they are.
        self.close = weakref.finalize(
            self, _close, os.getpid(), self._processes, self._ring,
            self._pipes)
        if workers:
            self._start(workers)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def request(self, epoch: int, samples: numpy.ndarray) -> None:
        """Starts to read a batch: samples of an epoch, int64."""
        slot, count = self._free.popleft(), len(samples)
        head = self._ring.heads[slot]
        head['epoch'] = epoch
        head['samples'][:count] = samples
        self._requests.append((slot, count))
        if self._processes:
            # Small tasks, so that all workers finish a batch together.
            size = max(1, count // (8 * len(self._processes)))
            self._open[slot] = count
            self._pending.extend(
                _TASK.pack(self._ring.generation[0], slot, first,
                           min(size, count - first))
                for first in range(0, count, size))
            self._feed()

    def take(self) -> tuple[numpy.ndarray, numpy.ndarray, list[Failure]]:
        """The batch of the oldest request; an error if a worker has died.

        Returns:
            The good images, shape (good samples, C, H, W); bool, which of
            all samples they are; and what happened to the others.
        """
        slot, count = self._requests[0]
        if self._processes:
            self._wait(slot)
        else:
            _fill(self._ring, slot, range(count),
                  self._ring.generation[0], self._reader)
        self._requests.popleft()
        head = self._ring.heads[slot]
        good = head['outcomes'][:count] == DONE
        failures = [
            (int(head['samples'][place]), int(head['outcomes'][place]),
             head['messages'][place].decode(errors='replace'))
            for place in numpy.flatnonzero(~good).tolist()]
        images = self._ring.images(slot)
        if len(self._held) == _HELD or failures:
            self._free.append(slot)
            return images[:count][good], good, failures
        self._held.add(slot)
        # Parts of this array refer to it, not to what it is a part of.
        weakref.finalize(images, _give_back, slot, self._held,
                         self._free).atexit = False
        return images[:count], good, failures

    def cancel(self) -> None:
        """Gives up all requests."""
        self._ring.generation[0] += 1
        while self._requests:
            slot, _ = self._requests.popleft()
            if self._processes:
                self._wait(slot)
            self._free.append(slot)

    def _start(self, workers: int) -> None:
        reader = self._reader
        table = reader.table.share()
        mine, theirs = os.pipe(), os.pipe()     # tasks; results
        # A task wakes several workers, of which one reads it.
        os.set_blocking(mine[0], False)
        os.set_blocking(mine[1], False)
        self._pipes[:] = mine[1], theirs[0]
        try:
            setting = pickle.dumps((
                os.getpid(), mine[0], theirs[1],
                (table, reader.table.root, len(reader.table)),
                (reader.transform, reader.decoder, reader.kind, reader.cache,
                 reader.seed), self._ring))
            fds = [mine[0], theirs[1], table.fd, self._ring.segment.fd]
            if reader.cache is not None:
                fds.append(reader.cache.segment.fd)
            for _ in range(workers):
                self._processes.append(_start_worker(setting, fds))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(mine[0])
            os.close(theirs[1])
            table.close()

    def _wait(self, slot: int) -> None:
        """Waits until a slot is filled, or its tasks are void."""
        self._check()
        self._feed()
        while self._open[slot]:
            if connection.wait([self._pipes[1]], _LOOK):
                data = os.read(self._pipes[1], 256 * _TASK.size)
                if not data:
                    self._raise_lost()
                for _, of, _, samples in _TASK.iter_unpack(data):
                    self._open[of] -= samples
            else:
                self._check()
            self._feed()
        del self._open[slot]

    def _feed(self) -> None:
        """Writes pending tasks until the pipe is full."""
        with contextlib.suppress(BlockingIOError):
            while self._pending:
                try:
                    os.write(self._pipes[0], self._pending[0])
                except BrokenPipeError:
                    self._raise_lost()
                self._pending.popleft()

    def _raise_lost(self) -> NoReturn:
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
                f'worker {number} (process {pid}) of this rank '
                f'{_describe_exit(code)}'
                for number, pid, code in ends) + f'; {_REMEDY}')


def _check_means(*means: object) -> None:
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


def _start_worker(setting: bytes, fds: list[int]) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, '-c',
         f'from {__name__} import work; work()'],
        stdin=subprocess.PIPE, pass_fds=fds,
        # One thread each, as there are several; imports as in the rank.
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONSAFEPATH': '1',
             'PYTHONPATH': os.pathsep.join(
                 path or os.getcwd() for path in sys.path)})
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(setting)
    return process


def _close(owner: int, processes: list[subprocess.Popen], ring: Ring,
           pipes: list[int]) -> None:
    """Ends the workers; called at the latest with the loader's life."""
    if os.getpid() != owner:        # a fork of the rank: they are not its own
        return
    ring.generation[0] += 1
    for fd in pipes:
        os.close(fd)
    for process in processes:
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ring.segment.close()


def _give_back(slot: int, held: set[int], free: deque[int]) -> None:
    held.discard(slot)
    free.append(slot)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f'ended with exit code {code}; its own message is above'
    name = signal.Signals(-code).name
    return f'was killed by {name}' + (
        ' (the system does that when memory is short)'
        if name in ('SIGKILL', 'SIGBUS') else '')
