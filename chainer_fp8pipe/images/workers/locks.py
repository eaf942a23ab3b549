"""A lock between processes, on memory that has no name.

Not filelock: it locks files by path, and a killed process leaves the file.
"""
from __future__ import annotations

import fcntl
import os
import threading
from typing import Any


class FileLock:
    """Admits one thread of one process at a time to ``with lock:``.

    The kernel releases the lock when the process ends, even by SIGKILL.

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
