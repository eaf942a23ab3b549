"""Memory that several processes share and that is never left over.

It has no name in the file system: it is there as long as a process has it
mapped or open, and however they end, even by SIGKILL, it goes with the last.
A child gets it as an inherited file descriptor; another rank of the node
opens it through the process that made it.
"""
from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import NamedTuple

import numpy

_NAME = 'chainer_fp8pipe'       # as /proc/PID/maps shows it: memfd:NAME


class SegmentPlace(NamedTuple):
    """Where memory is found: as a descriptor of a process, and which it is."""

    pid: int
    fd: int
    device: int
    file: int


class Segment:
    """Bytes that processes share.

    Args:
        fd: An open file descriptor of the memory; the segment closes it.

    Attributes:
        fd: The descriptor, to be inherited by children.
        size: Bytes.
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
        """Where other processes of the node find it."""
        status = os.fstat(self.fd)
        return SegmentPlace(os.getpid(), self.fd, status.st_dev, status.st_ino)

    @classmethod
    def open(cls, place: SegmentPlace) -> Segment | None:
        """The memory that another process of this node made.

        None if this process may not, or the system has no ``/proc``.
        """
        try:
            fd = os.open(f'/proc/{place.pid}/fd/{place.fd}', os.O_RDWR)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (place.device, place.file):
            # In another container: that process is not the one meant.
            os.close(fd)
            return None
        return cls(fd)

    def array(self, start: int, shape: tuple[int, ...],
              dtype: numpy.typing.DTypeLike) -> numpy.ndarray:
        """An array in this memory, ``start`` bytes from its beginning.

        The memory stays mapped as long as such an array is there, even after
        :meth:`close`.
        """
        return numpy.ndarray(shape, dtype, self._map, start)

    def view(self, start: int, size: int) -> memoryview:
        """``size`` bytes from ``start`` on, to be read or written."""
        return memoryview(self._map)[start:start + size]

    def close(self) -> None:
        """Lets go of the memory; nothing happens the second time."""
        if self.fd >= 0:
            self._close()
            self.fd = -1
            del self._map


def _anonymous_file() -> int:
    if hasattr(os, 'memfd_create'):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:      # a file without a name
        return os.dup(file.fileno())
