"""A lock between processes that outlives none of its holders."""
from __future__ import annotations

import fcntl
import os
import threading
from types import TracebackType


class FileLock:
    """Only one thread of one process is inside ``with lock:``.

    The kernel keeps it for the process, and opens it when that ends, even by
    SIGKILL: nobody waits for the dead.

    Args:
        fd: Descriptor of the file or memory that is locked, the same in all
            processes.  No other descriptor of it may be closed while the
            lock is used, as that would open the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = threading.Lock()    # the kernel does not tell apart
        self._owner = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._owner:      # a fork: its threads are its own
            self._owner = os.getpid()
            self._threads = threading.Lock()
        self._threads.acquire()
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, kind: type[BaseException] | None,
                 error: BaseException | None,
                 trace: TracebackType | None) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()
