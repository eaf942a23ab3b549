"""Files' bytes in memory that the ranks of a node share."""
# The memory has no name in the file system, so that the kernel frees it with
# the last process that has it open, even after SIGKILL.  Others of the node
# open it through /proc/PID/fd.  A container's /dev/shm is too small.
#
#     bytes given out | an entry per sample: start, size | the bytes
#
# The process that first reads a sample adds it.  What does not fit is not
# kept, and none is evicted: every sample is used once in an epoch, so an
# evicted one would be needed sooner than the new one.
from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy


class Cache:
    """Bytes of samples in shared memory, made by :meth:`create`.

    All is read and written under a lock on the memory, which the kernel
    releases when a process ends, even by SIGKILL.  A pickle opens the same
    memory on this node.

    Args:
        fd: Open descriptor of the memory; the cache closes it.
        samples: How many there are.
    """

    def __init__(self, fd: int, samples: int) -> None:
        self._fd, self._close = fd, weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        numbers = numpy.frombuffer(self._map, numpy.int64, 1 + 2 * samples)
        self._used, self._entries = numbers[:1], numbers[1:].reshape(-1, 2)

    @classmethod
    def create(cls, samples: int, budget: int) -> Cache:
        """An empty cache of ``budget`` bytes; a page is taken when written."""
        fd = os.memfd_create('chainer_fp8pipe', os.MFD_CLOEXEC)
        start = 8 + 16 * samples
        os.ftruncate(fd, start + budget)
        cache = cls(fd, samples)
        cache._used[0] = start
        return cache

    @classmethod
    def open(cls, place: tuple[int, ...], samples: int) -> Cache | None:
        """That of another process of this node; None if not allowed."""
        pid, number, *file = place
        try:
            fd = os.open(f'/proc/{pid}/fd/{number}', os.O_RDWR)
        except OSError:
            return None
        status = os.fstat(fd)
        if [status.st_dev, status.st_ino] != file:
            # In another container the number is another process's.
            os.close(fd)
            return None
        return cls(fd, samples)

    @property
    def place(self) -> tuple[int, ...]:
        """For others of the node: process, descriptor, device and file."""
        status = os.fstat(self._fd)
        return os.getpid(), self._fd, status.st_dev, status.st_ino

    def get(self, index: int) -> bytes | None:
        """What is kept; None if nothing is."""
        with self._locked():
            start, size = self._entries[index].tolist()
        return self._map[start:start + size] if start else None

    def put(self, index: int, data: bytes) -> None:
        """Keeps a sample if it fits and is not kept."""
        with self._locked():
            start = int(self._used[0])
            stop = start + len(data)
            if not self._entries[index, 0] and stop <= len(self._map):
                # A process that is killed here leaves no half of a sample.
                self._map[start:stop] = data
                self._used[0] = stop
                self._entries[index] = start, len(data)

    def __reduce__(self) -> Any:
        return Cache.open, (self.place, len(self._entries))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened anew, it is locked for other threads and forks as well.
        with open(f'/proc/self/fd/{self._fd}', 'rb') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:        # a fork may hold what is closed here
                fcntl.flock(file, fcntl.LOCK_UN)
