"""Ends what a job has left behind on this machine."""
# All processes of a job, whatever sessions and groups they have moved to, have
# a mark in their environment, NAME=value, by which they are found in /proc; on
# systems without it, none are.
from __future__ import annotations

import contextlib
import glob
import os
import signal
import time

#: Seconds after which a process that was killed is left to the system.  One
#: that waits for a dead disk ends when the disk answers, or never.
_KILLED = 10.0
_PAUSE = 0.01
#: What MPICH leaves of a job that was killed; other libraries use memory
#: without a name, or clear up when they are told to end.
_SEGMENTS = '/dev/shm/mpich_shm_*'


def marked(mark: str) -> list[int]:
    """The living processes of a job, other than this one."""
    # A process that is dead but not waited for has no environment.
    return [pid for pid in _numbers() if pid != os.getpid()
            and mark.encode() in _read(pid, 'environ').split(b'\0')]


def kill_rest(mark: str, patience: float) -> None:
    """Kills what has not ended by itself after ``patience`` seconds."""
    end = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < end + _KILLED:
        for pid in left if time.monotonic() >= end else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)


def remove_segments(since: float) -> None:
    """Removes MPICH's shared memory that nobody uses any more.

    Args:
        since: Only what was made later, in seconds of ``time.time()``.
    """
    mine = []
    for path in glob.glob(_SEGMENTS):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if found.st_uid == os.geteuid() and found.st_ctime >= since:
                mine.append(path)
    used = b''.join(_read(pid, 'maps') for pid in _numbers() if mine)
    for path in mine:
        if path.encode() not in used:
            with contextlib.suppress(OSError):
                os.remove(path)


def _numbers() -> list[int]:
    """Of all processes."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir('/proc') if name.isdigit()]
    return []


def _read(pid: int, name: str) -> bytes:
    """A file about a process; nothing of one that has ended."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/{name}', 'rb'
                                            ) as file:
        return file.read()
    return b''
