"""Samples in the memory of a node, once for all its processes.

    header | one entry per sample: start, size, and two more | the bytes

The two more are height and width of pixels; or, of a file, the bytes of the
index of its codes, which follows it, and 0.

The process that first reads a sample adds it.  A sample that does not fit is
not kept, and none is evicted: every sample is used once in an epoch, so an
evicted one would be needed sooner than the new one.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy

from .workers.segment import FileLock, Segment

_USED = 0       # header: bytes that are given out
_HEADER = 8
_ENTRY = 4      # numbers of int64 in an entry
_RESERVED = -1  # in place of a start: a process is writing the sample
_ALIGNMENT = 16


class CachedFile(NamedTuple):
    """Read-only views of a file in the cache.

    The memory stays as long as these views, even after :meth:`Cache.close`.
    """

    data: memoryview
    extra: memoryview       # the index of its codes; empty if it has none


class Cache:
    """Bytes or pixels of samples in the shared memory of :meth:`create`."""

    def __init__(self, segment: Segment, samples: int) -> None:
        self.segment = segment
        self._header = segment.array(0, (1,), numpy.int64)
        self._entries = segment.array(_HEADER, (samples, _ENTRY), numpy.int64)
        self._start = _overhead(samples)
        self.budget = segment.size - self._start
        self._lock = FileLock(segment.fd)

    @classmethod
    def create(cls, samples: int, budget: int) -> Cache:
        """An empty cache of ``budget`` bytes, and 32 more per sample."""
        return cls(Segment.create(_overhead(samples) + budget), samples)

    @property
    def room(self) -> int:
        """Bytes left of the budget."""
        return self.budget - int(self._header[_USED])

    def get(self, index: int) -> CachedFile | None:
        """The file of a sample; None if :meth:`put` has not kept it."""
        start, size, extra, _ = self._entry(index)
        if start <= 0:
            return None
        view = self.segment.view(start, size).toreadonly()
        return CachedFile(view[:size - extra], view[size - extra:])

    def get_pixels(self, index: int) -> numpy.ndarray | None:
        """A read-only view of a sample's pixels; None if not kept."""
        start, _, height, width = self._entry(index)
        if start <= 0:
            return None
        pixels = self.segment.array(start, (height, width, 3), numpy.uint8)
        pixels.flags.writeable = False
        return pixels

    def put(self, index: int, data: bytes,
            extra: bytes | memoryview = b'') -> bool:
        """Keeps a sample's file, and the index of its codes if it has one.

        Returns:
            Whether they fit; also if another process keeps them, or is about
            to.
        """
        return self._put(index, [numpy.frombuffer(part, numpy.uint8)
                                 for part in (data, extra)], len(extra), 0)

    def put_pixels(self, index: int, pixels: numpy.ndarray) -> bool:
        """Like :meth:`put`, for pixels: (H, W, 3), uint8."""
        return self._put(index, [pixels], *pixels.shape[:2])

    def statistics(self) -> tuple[int, int]:
        """Number of samples kept, and their bytes."""
        with self._lock:
            kept = self._entries[:, 0] > 0
            return int(kept.sum()), int(self._entries[kept, 1].sum())

    def close(self) -> None:
        """Closes the memory."""
        self.segment.close()
        del self._header, self._entries

    def _entry(self, index: int) -> list[int]:
        with self._lock:
            return self._entries[index].tolist()

    def _put(self, index: int, parts: list[numpy.ndarray], *more: int
             ) -> bool:
        size = sum(part.nbytes for part in parts)
        with self._lock:
            if self._entries[index, 0]:     # another process was faster
                return True
            start = int(self._header[_USED])
            if start + size > self.budget:
                return False
            self._header[_USED] = start - (-size // _ALIGNMENT * _ALIGNMENT)
            self._entries[index, 0] = _RESERVED
        # Without the lock, as copying takes long.  A process that is killed
        # here leaves a hole, not half a sample: the entry is written last,
        # and until then others read the file.
        start = at = start + self._start
        for part in parts:
            self.segment.array(at, part.shape, numpy.uint8)[...] = part
            at += part.nbytes
        with self._lock:
            self._entries[index] = start, size, *more
        return True


def _overhead(samples: int) -> int:
    size = _HEADER + samples * _ENTRY * 8
    return -(-size // _ALIGNMENT) * _ALIGNMENT
