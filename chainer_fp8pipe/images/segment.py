"""Anonymous memory that several processes share, and a lock on it.

The memory has no name in the file system, and the kernel frees it with the
last process that has it open, even after SIGKILL.  A child inherits the file
descriptor; another rank of the node opens it through ``/proc/PID/fd``.

Not multiprocessing.shared_memory: after SIGKILL of a rank and its resource
tracker, which launchers do, ``/dev/shm/psm_*`` is left (Python 3.11).
"""
from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from typing import Any, NamedTuple

import numpy

_NAME = 'chainer_fp8pipe'       # as /proc/PID/maps shows it: memfd:NAME


class SegmentPlace(NamedTuple):
    """A descriptor of a process, and the file behind that descriptor."""

    pid: int
    fd: int
    device: int
    file: int


class Segment:
    """Bytes that processes share.

    Args:
        fd: Open descriptor of the memory, for children to inherit; the
            segment closes it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = -1
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int) -> Segment:
        """New memory, all zero; a page is taken when it is first written."""
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, max(size, 1))
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, arrays: list[numpy.ndarray]) -> Segment:
        """New memory with copies of arrays one after the other."""
        segment = cls.create(sum(array.nbytes for array in arrays))
        start = 0
        for array in arrays:
            segment.array(start, array.shape, array.dtype)[...] = array
            start += array.nbytes
        return segment

    @property
    def place(self) -> SegmentPlace:
        """The address of this memory for other processes of the node."""
        status = os.fstat(self.fd)
        return SegmentPlace(os.getpid(), self.fd, status.st_dev, status.st_ino)

    @classmethod
    def open(cls, place: SegmentPlace) -> Segment | None:
        """Memory of another process of this node; None if not allowed."""
        try:
            fd = os.open(f'/proc/{place.pid}/fd/{place.fd}', os.O_RDWR)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (place.device, place.file):
            # In another container the number is another process's.
            os.close(fd)
            return None
        return cls(fd)

    def array(self, start: int, shape: tuple[int, ...],
              dtype: numpy.typing.DTypeLike) -> numpy.ndarray:
        """An array ``start`` bytes from the beginning of this memory.

        The memory stays mapped as long as the array, even after
        :meth:`close`.
        """
        return numpy.ndarray(shape, dtype, self._map, start)

    def view(self, start: int, size: int) -> memoryview:
        """``size`` bytes from ``start`` on, to be read or written."""
        return memoryview(self._map)[start:start + size]

    def close(self) -> None:
        """Closes the memory; a second call does nothing."""
        if self.fd >= 0:
            self._close()
            self.fd = -1
            del self._map


class FileLock:
    """Admits one thread of one process at a time to ``with lock:``.

    The kernel releases the lock when the process ends, even by SIGKILL.  Not
    filelock: it locks files by path, and a killed process leaves the file.

    Args:
        fd: Descriptor of the same file or memory in all processes.  To close
            another descriptor of that file would release the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = threading.Lock()    # the kernel sees one process
        self._owner = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._owner:      # a fork has other threads
            self._owner = os.getpid()
            self._threads = threading.Lock()
        self._threads.acquire()
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: Any) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()


def _anonymous_file() -> int:
    if hasattr(os, 'memfd_create'):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:      # a file without a name
        return os.dup(file.fileno())
