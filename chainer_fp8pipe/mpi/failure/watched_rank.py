"""A rank of a watchdog's node: its process, its end, and what it has said."""
from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from typing import Any

from .stack import Frame, as_text, before_wait, call, frames_of_dump, place
from .stall import RankView, State

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


class WatchedRank(RankProcess):
    """A rank's process, its line to the watchdog, and what it has said."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.line: socket.socket | None = None
        self.is_closed = False      # the line
        self.is_over = False
        self.left = False           # it has said goodbye
        self.rank = -1
        self.who = ''
        self.asked = self.heard = 0.0       # when
        self.said: dict[str, Any] = {}
        self.updated = 0.0

    def hear(self, message: dict[str, Any], now: float) -> None:
        """Takes what the rank says of itself."""
        if 'who' in message:
            self.rank, self.who = message['rank'], message['who']
            self.heard = self.updated = now
            if message['dump']:
                self.dumps(*message['dump'])
        elif 'updates' in message:
            if message['updates'] != self.said.get('updates'):
                self.updated = now
            self.heard, self.said = now, message

    def ask(self, now: float, for_details: bool) -> None:
        """Asks what the rank does, unless it still has to answer."""
        if self.line and not self.is_closed and not self.left and (
                self.asked <= self.heard):
            self.asked = now
            with contextlib.suppress(OSError):
                self.line.send(b'details' if for_details else b'count',
                               socket.MSG_NOSIGNAL)

    def view(self, is_silent: bool) -> RankView:
        """What is known of it."""
        view = RankView(self.rank, self.who, State.SILENT)
        state = self.state()
        if self.left:
            return view._replace(state=State.LEFT,
                                 details='its program has ended')
        if state in ('', 'Z', 'X'):
            return view._replace(state=State.GONE,
                                 details='its process has ended')
        if state == 'T':
            return view._replace(state=State.STOPPED, details=(
                f'at {place(self._frames())}' if self.said.get('stack')
                else ''))
        if state == 't':
            return view._replace(details='a debugger holds its process')
        if is_silent:
            return self._held(view, state)
        return self._answered(view._replace(
            updates=self.said.get('updates', -1)))

    def _frames(self) -> list[Frame]:
        return [Frame(*frame) for frame in self.said.get('stack', ())]

    def _answered(self, view: RankView) -> RankView:
        if 'stack' not in self.said:
            return view._replace(state=State.WORKS)
        frames, waits = self._frames(), self.said['waits']
        called = call(frames)
        where = f'at {place(frames)}'
        view = view._replace(
            state=State.WORKS, details=where,
            stack=as_text(before_wait(frames) or frames))
        if waits:
            text, ranks = waits[0]
            return view._replace(
                state=State.WAITS, details=f'for {text}; {where}',
                waits_for=tuple(ranks), call=f'{called} {where}',
                moves=f'{text} {self.said["moves"]}')
        if called:
            outside = called.startswith('MPI') and self.said['outside']
            return view._replace(
                state=State.WAITS, call=f'{called} {where}', details=(
                    f'in {called}' + ', maybe for a process outside of the '
                    'job' * outside + f'; {where}'),
                moves=str(self.said['moves']), outside=outside)
        return view

    def _held(self, view: RankView, state: str) -> RankView:
        """Of a rank in which no thread can answer."""
        frames = frames_of_dump(self.written_stack())
        self.ask_for_stack()        # for the next time
        if not frames:
            return view._replace(details=(
                f'its process is there (state {state}), but a library keeps '
                'the interpreter from other threads'))
        where, called = f'at {place(frames)}', call(frames)
        view = view._replace(stack=as_text(frames), call=f'{called} {where}')
        if called.startswith('MPI'):
            return view._replace(state=State.WAITS, outside=True,
                                 details=f'in {called}; {where}')
        return view._replace(details=(
            'a library keeps the interpreter from other threads, ' + where))
