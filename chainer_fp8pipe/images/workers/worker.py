"""A process that reads samples for a rank.

The rank starts ``python -m chainer_fp8pipe.images.workers.worker`` and sends
its setting through its standard input.  The process imports neither Chainer
nor MPI, and is a new one, not a fork: ranks have threads, and memory that is
registered with the network card.  Its tasks and results cross two pipes that
all workers of a rank share; pixels stay in shared memory.

The process ends with the rank, even by SIGKILL: the pipe of tasks has no
writer then.
"""
from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import traceback
from multiprocessing import connection
from typing import NamedTuple

import numpy

from ..bad_image import ImageError
from ..cache import Cache
from ..file_list import TableHandle
from ..reading import CacheKind, Reader
from .batch_ring import BatchRing, Outcome, RingLayout, Slot
from .segment import Segment

_PATIENCE = 1.0         # seconds between checks of the parent


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
