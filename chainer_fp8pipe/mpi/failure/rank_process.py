"""A process of another program, as the watchdog sees it: how it ends."""
from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import struct
import time

_DYING = 1.0                # seconds from the end of a line to that of all
_PATIENCE = 0.1             # seconds to wait for how a process ended
_LONGEST_STACK = 8000       # characters
_PIDFD_GET_INFO = 0xC040FF0B        # <linux/pidfd.h>
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct('=Q52xi')     # the mask, and the wait status at 60


class RankProcess:
    """A process that is watched from now on.

    Attributes:
        pid: Its number.
        pidfd: Becomes readable when the process ends; None if the system has
            no such file, or the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(pid)
        self._dump = 0, 0       # signal that has it written, and to where

    def state(self) -> str:
        """One letter, as in /proc: T is stopped; '' if it is gone."""
        return (self._fields() or [''])[0]

    def is_gone(self, seconds: float = _DYING) -> bool:
        """Whether it has ended, or ends within so many seconds."""
        end = time.monotonic() + seconds
        while self.state() not in ('', 'Z', 'X'):
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True

    def status(self) -> int | None:
        """How it ended, as ``os.wait`` returns it; None if not known."""
        end = time.monotonic() + _PATIENCE
        while True:
            status = self._before_wait() or self._after_wait()
            if status is not None or time.monotonic() > end:
                return status
            time.sleep(1e-3)

    def dumps(self, number: int, file: int) -> None:
        """A signal has the process write its stack to a file of its own."""
        self._dump = number, file

    def ask_for_stack(self) -> None:
        """Has the process write its stack, which it can though it waits."""
        number, _ = self._dump
        if number and self._handles(number):
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def written_stack(self) -> str:
        """What the process has written last."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/fd/{self._dump[1]}') as file:
            return file.read()[-_LONGEST_STACK:] if self._dump[0] else ''
        return ''

    def _handles(self, number: int) -> bool:
        """Whether a signal has a handler; else it would end the process."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/status') as file:
            for line in file:
                if line.startswith('SigCgt:'):
                    return bool(int(line.split()[1], 16) >> number - 1 & 1)
        return False

    def _fields(self) -> list[str]:
        """Of /proc, from the state on; [] if the process is gone."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/stat') as file:
            return file.read().rpartition(')')[2].split()
        return []

    def _before_wait(self) -> int | None:
        """The status of a zombie; None for 0, which may be a refusal."""
        fields = self._fields()
        return int(fields[-1]) or None if fields[:1] == ['Z'] else None

    def _after_wait(self) -> int | None:
        """The status after the parent has waited; from Linux 6.15 on."""
        if self.pidfd is None:
            return None
        info = array.array('B', _INFO.pack(_PIDFD_INFO_EXIT, 0))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
            mask, status = _INFO.unpack(info)
            if mask & _PIDFD_INFO_EXIT:
                return status
        return None


def in_words(status: int | None) -> str:
    """How a process has ended, from its wait status."""
    if status is None:
        return 'was killed or crashed'
    if not os.WIFSIGNALED(status):
        return (f'ended with exit code {os.WEXITSTATUS(status)}, without '
                'an exception or MPI_Finalize,')
    number = os.WTERMSIG(status)
    name = f'signal {number}'
    with contextlib.suppress(ValueError):       # it has no name
        name = signal.Signals(number).name
    return f'was killed by {name}' + (
        ' (the system does that when memory is short)'
        if name in ('SIGKILL', 'SIGBUS') else '')
