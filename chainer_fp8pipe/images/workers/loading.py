"""Batches of samples: read ahead by workers, or here on demand."""
from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import numpy

from ..reading import Reader
from .batch_ring import BatchRing, Outcome, RingLayout, Slot
from .pinned import PinnedMemory
from .segment import Segment
from .worker import read_into
from .workers import WorkerPool

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
        self.pinned = PinnedMemory(self._slots.segment)
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
        self.pinned.release()
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
