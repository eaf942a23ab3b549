"""A process that reads samples for a rank.

The rank starts ``python -m chainer_fp8pipe.images.worker`` and sends
its setting through its standard input.  The process imports neither Chainer
nor MPI, and is a new one, not a fork: ranks have threads, and memory that is
registered with the network card.  Its tasks and results cross two pipes that
all workers of a rank share; pixels stay in shared memory.

The process ends with the rank, even by SIGKILL: the pipe of tasks has no
writer then.
"""
# Batches lie in shared memory, in a ring that workers fill and a rank empties.
# Each slot has room for one batch:
#
#     epoch and samples to read | outcome of each | messages | images
from __future__ import annotations

import enum
import math
import os
import pickle
import signal
import struct
import sys
import traceback
from multiprocessing import connection
from typing import NamedTuple

import numpy

from .decoding import ImageError
from .file_list import TableHandle
from .reading import Cache, CacheKind, Reader
from .segment import Segment

_PATIENCE = 1.0         # seconds between checks of the parent


_PAGE = 4096            # images start on one, as a GPU's driver likes it
_MESSAGE = 1024         # bytes of an error's text that are kept


class Outcome(enum.IntEnum):
    """How reading a sample ended."""

    DONE = 0
    IMAGE = 1           # the image cannot be used
    FILE = 2            # the file cannot be read
    OTHER = 3           # something else, most likely in the transform


class Slot:
    """Arrays of one slot, in shared memory: a row for each sample."""

    def __init__(self, segment: Segment, start: int, layout: RingLayout
                ) -> None:
        n = layout.capacity
        self.epoch = segment.array(start, (1,), numpy.int64)
        self.indices = segment.array(start + 8, (n,), numpy.int64)
        self.outcomes = segment.array(start + 8 + 8 * n, (n,), numpy.int32)
        self._messages = segment.array(
            start + 8 + 12 * n, (n,), f'S{_MESSAGE}')
        self.images = segment.array(start + layout.head,
                                    (n, *layout.shape), layout.dtype)

    def set_message(self, place: int, text: str) -> None:
        """Keeps the last kilobyte of a text about one sample."""
        self._messages[place] = text.encode(errors='replace')[-_MESSAGE:]

    def message(self, place: int) -> str:
        """The text about one sample."""
        return self._messages[place].decode(errors='replace')


class RingLayout(NamedTuple):
    """Offsets of all arrays, for the rank and for its workers."""

    slots: int
    capacity: int               # samples in a slot
    shape: tuple[int, ...]      # of an image: (C, H, W)
    dtype: numpy.dtype

    @property
    def head(self) -> int:
        """Bytes of a slot before the images."""
        return _pages(8 + (12 + _MESSAGE) * self.capacity)

    @property
    def slot_bytes(self) -> int:
        return self.head + _pages(
            self.capacity * math.prod(self.shape) * self.dtype.itemsize)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots, and of one page before them."""
        return _PAGE + self.slots * self.slot_bytes


class BatchRing:
    """All slots of an iterator."""

    def __init__(self, segment: Segment, layout: RingLayout) -> None:
        self.segment, self.layout = segment, layout
        # Tasks of an earlier generation are void.
        self.generation = segment.array(0, (1,), numpy.int64)

    def __getitem__(self, number: int) -> Slot:
        """New arrays for a slot; the slot is in use while they live."""
        return Slot(self.segment, _PAGE + number * self.layout.slot_bytes,
                    self.layout)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Task(NamedTuple):
    """Samples of one batch that a worker reads."""

    generation: int     # the task is void if this is not the ring's
    slot: int           # number of the slot that the samples go to
    first: int          # the first sample's place in the slot
    samples: int        # how many there are

    def pack(self) -> bytes:
        """Bytes for a pipe, few enough to cross in one piece."""
        return _RECORD.pack(*self)


_RECORD = struct.Struct('=qqqq')
RECORD_BYTES = _RECORD.size


def unpack(data: bytes) -> list[Task]:
    """The tasks of bytes that came through a pipe."""
    return [Task(*numbers) for numbers in _RECORD.iter_unpack(data)]


class Setting(NamedTuple):
    """A worker's arguments; file descriptors are inherited."""

    parent: int
    tasks: int
    results: int
    table: TableHandle
    slots: int
    layout: RingLayout
    kind: CacheKind
    cache: int | None
    seed: int
    means: bytes            # the transform and the decoder, pickled


def main() -> None:
    """Reads the setting, then does tasks until the rank is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the rank decides
    setting = Setting(*pickle.load(sys.stdin.buffer))
    table = setting.table.open()
    transform, decoder = pickle.loads(setting.means)
    cache = (None if setting.cache is None
             else Cache(Segment(setting.cache), len(table)))
    reader = Reader(table, transform, decoder, setting.kind, cache,
                    setting.seed)
    slots = BatchRing(Segment(setting.slots), setting.layout)
    while data := _next(setting):
        for task in unpack(data):
            _perform(task, reader, slots)
            try:
                os.write(setting.results, task.pack())
            except BrokenPipeError:
                return


def _next(setting: Setting) -> bytes:
    """Waits for a task; b'' if the rank is gone."""
    while True:
        connection.wait([setting.tasks], _PATIENCE)
        try:
            return os.read(setting.tasks, RECORD_BYTES)
        except BlockingIOError:         # another worker was faster
            # A fork of the rank may still hold the pipe.
            if os.getppid() != setting.parent:
                return b''


def _perform(task: Task, reader: Reader, slots: BatchRing) -> None:
    slot = slots[task.slot]
    for place in range(task.first, task.first + task.samples):
        if slots.generation[0] != task.generation:
            return
        read_into(slot, place, reader)


def read_into(slot: Slot, place: int, reader: Reader) -> None:
    """Reads the sample of one place of a slot; raises nothing."""
    outcome, reason = attempt(reader, int(slot.indices[place]),
                              int(slot.epoch[0]), slot.images[place])
    slot.outcomes[place] = outcome
    if reason:
        slot.set_message(place, reason)


def attempt(reader: Reader, sample: int, epoch: int, out: numpy.ndarray
            ) -> tuple[Outcome, str]:
    """Reads a sample into ``out``; returns how it went, and why."""
    try:
        reader.read(sample, epoch, out)
    except ImageError as error:
        return Outcome.IMAGE, error.reason
    except OSError as error:
        return Outcome.FILE, f'{type(error).__name__}: {error}'
    except Exception:
        return Outcome.OTHER, traceback.format_exc()
    return Outcome.DONE, ''


if __name__ == '__main__':
    main()
