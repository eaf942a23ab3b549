"""A rank of a watchdog's node: what is known of it."""
from __future__ import annotations

import contextlib
import socket
from typing import Any

from .rank_process import RankProcess
from .stack import Frame, as_text, before_wait, call, frames_of_dump, place
from .stall_cause import RankView, State


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
