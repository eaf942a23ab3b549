"""Batches in shared memory: a ring that workers fill and a rank empties.

Each slot has room for one batch:

    epoch and samples to read | outcome of each | messages | images
"""
from __future__ import annotations

import enum
import math
from typing import NamedTuple

import numpy

from .segment import Segment

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
