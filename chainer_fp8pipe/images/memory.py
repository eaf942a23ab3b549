"""Memory: pieces that processes share, and how much the machine has left."""
# A Segment has no name in the file system, and the kernel frees it with the
# last process that has it open, even after SIGKILL.  A child inherits the
# descriptor; another rank of the node opens it through /proc/PID/fd.  Not
# multiprocessing.shared_memory: after SIGKILL of a rank and its resource
# tracker, which launchers do, /dev/shm/psm_* is left (Python 3.11).
#
# Not psutil for the amounts: its virtual_memory reads /proc/meminfo alone,
# and a container is killed at the limit of its control group.
from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import numpy

#: A process, its descriptor, and the device and file behind that.
Place = tuple[int, int, int, int]

_NAME = 'chainer_fp8pipe'       # as /proc/PID/maps shows it: memfd:NAME


class Segment:
    """Bytes that processes share.

    Its pickle is for children that inherit its descriptor.

    Args:
        fd: Open descriptor of the memory; the segment closes it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = -1
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.fd,)

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

    @property
    def place(self) -> Place:
        """The address of this memory for other processes of the node."""
        status = os.fstat(self.fd)
        return os.getpid(), self.fd, status.st_dev, status.st_ino

    @classmethod
    def open(cls, place: Place) -> Segment | None:
        """Memory of another process of this node; None if not allowed."""
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
        return cls(fd)

    def array(self, start: int, shape: tuple[int, ...],
              dtype: numpy.typing.DTypeLike) -> numpy.ndarray:
        """An array ``start`` bytes from the beginning of this memory.

        The memory stays mapped as long as the array, even after
        :meth:`close`.
        """
        return numpy.ndarray(shape, dtype, self._map, start)

    def close(self) -> None:
        """Closes the memory; a second call does nothing."""
        if self.fd >= 0:
            self._close()
            self.fd = -1
            del self._map


def _anonymous_file() -> int:
    if hasattr(os, 'memfd_create'):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:      # a file without a name
        return os.dup(file.fileno())


# --- how much there is -------------------------------------------------------

_GROUPS = '/sys/fs/cgroup'


def total_bytes() -> int:
    """Bytes that the machine has, or a control group may use if fewer."""
    return min([_machine('MemTotal'), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Bytes that can still be used without swapping or a kill."""
    return min([_machine('MemAvailable'),
                *(max(limit - used, 0) for limit, used in _limits())])


def _machine(field: str) -> int:
    with contextlib.suppress(OSError, KeyError):
        return _fields('/proc/meminfo')[field] * 1024
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and present use, in bytes, of each group that has a limit."""
    lines = []
    with contextlib.suppress(OSError):
        lines = _read('/proc/self/cgroup').splitlines()
    for line in lines:
        _, kinds, path = line.split(':', 2)
        if kinds == '':
            root, limit, used = _GROUPS, 'memory.max', 'memory.current'
        elif kinds == 'memory':
            root, limit, used = (_GROUPS + '/memory', 'memory.limit_in_bytes',
                                 'memory.usage_in_bytes')
        else:
            continue
        path = path.rstrip('/')
        while True:         # this process's group, and all around it
            # 'max' in place of a number means no limit.
            with contextlib.suppress(OSError, ValueError, KeyError):
                most = int(_read(f'{root}{path}/{limit}'))
                now = int(_read(f'{root}{path}/{used}'))
                parts = _fields(f'{root}{path}/memory.stat')
                # Pages of files are given back when memory is short.
                yield most, now - parts['active_file'] - parts['inactive_file']
            if not path:
                break
            path = path.rpartition('/')[0]


def _fields(path: str) -> dict[str, int]:
    """Lines such as ``name: 12 kB`` or ``name 12``."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0].rstrip(':'): int(row[1]) for row in rows}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
