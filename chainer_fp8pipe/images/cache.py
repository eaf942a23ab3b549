"""Files' bytes in memory that the ranks of a node share."""
# The memory has no name in the file system, and the kernel frees it with the
# last process that has it open, even after SIGKILL.  Another rank of the node
# opens it through /proc/PID/fd.  Not multiprocessing.shared_memory: after
# SIGKILL of a rank and its resource tracker, which launchers do,
# /dev/shm/psm_* is left (Python 3.11).  Not a window of MPI: /dev/shm is
# often small in a container.
#
#     bytes given out | an entry per sample: start, size | the bytes
#
# The process that first reads a sample adds it.  A sample that does not fit
# is not kept, and none is evicted: every sample is used once in an epoch, so
# an evicted one would be needed sooner than the new one.
from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import NoReturn

import numpy

#: A process, its descriptor, and the device and file behind that.
Place = tuple[int, int, int, int]

_RESERVED = -1  # in place of a start: a process is writing the sample


class Cache:
    """Bytes of samples in shared memory, made by :meth:`create`.

    All entries are read and written under a lock on the memory, which the
    kernel releases when a process ends, even by SIGKILL.

    Args:
        fd: Open descriptor of the memory; the cache closes it.
        samples: How many there are.
    """

    def __init__(self, fd: int, samples: int) -> None:
        self._fd, self._close = fd, weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        numbers = numpy.frombuffer(self._map, numpy.int64, 1 + 2 * samples)
        self._used, self._entries = numbers[:1], numbers[1:].reshape(-1, 2)
        self._threads = threading.Lock()    # the kernel sees one process
        self._owner = os.getpid()

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
    def open(cls, place: Place, samples: int) -> Cache | None:
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
    def place(self) -> Place:
        """The address of this memory for other processes of the node."""
        status = os.fstat(self._fd)
        return os.getpid(), self._fd, status.st_dev, status.st_ino

    def get(self, index: int) -> bytes | None:
        """What is kept; None if nothing is."""
        with self._locked():
            start, size = self._entries[index].tolist()
        return self._map[start:start + size] if start > 0 else None

    def put(self, index: int, data: bytes) -> None:
        """Keeps a sample if it fits, and if no other process keeps it."""
        with self._locked():
            start = int(self._used[0])
            if self._entries[index, 0] or start + len(data) > len(self._map):
                return
            self._used[0] += len(data)
            self._entries[index, 0] = _RESERVED
        # Without the lock, as copying takes long.  A process that is killed
        # here leaves a hole, not half a sample.
        self._map[start:start + len(data)] = data
        with self._locked():
            self._entries[index] = start, len(data)

    def statistics(self) -> tuple[int, int]:
        """Number of samples kept, and their bytes."""
        with self._locked():
            kept = self._entries[self._entries[:, 0] > 0]
        return len(kept), int(kept[:, 1].sum())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ImageFolder with cache='memory' cannot be pickled: only forks "
            'of this process share its memory; use its iterator(), or '
            'cache=None')

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._owner:      # a fork has other threads
            self._owner, self._threads = os.getpid(), threading.Lock()
        with self._threads:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


def available_bytes() -> int:
    """Bytes that can still be used without swapping or a kill.

    Of the machine, and of each control group (version 2) around this process.
    """
    found, group = [_fields('/proc/meminfo')['MemAvailable'] * 1024], ''
    with contextlib.suppress(OSError), open('/proc/self/cgroup') as file:
        group = file.read().rpartition('::')[2].strip()
    while group:
        folder = '/sys/fs/cgroup' + group.rstrip('/')
        with contextlib.suppress(OSError, ValueError, KeyError):
            stat = _fields(f'{folder}/memory.stat')
            most, now = ([*_fields(f'{folder}/memory.{name}')][0]
                         for name in ('max', 'current'))
            # Pages of files are given back when memory is short.
            found.append(max(0, int(most) - int(now) + stat['active_file']
                             + stat['inactive_file']))
        group = group.rpartition('/')[0]
    return min(found)


def _fields(path: str) -> dict[str, int]:
    """Lines such as ``name: 12 kB``, ``name 12`` or ``12``."""
    with open(path) as file:
        rows = [line.split() for line in file]
    return {row[0].rstrip(':'): int(row[1]) if row[1:] else 0 for row in rows}
