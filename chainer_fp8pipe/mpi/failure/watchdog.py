"""The watchdog: a process beside the ranks that says why a job dies."""
# A rank that is killed prints nothing, and its launcher kills all others; a
# rank that is stopped cannot say so, nor can one whose interpreter a library
# holds.  So each node has a process of its own session, which no signal to the
# ranks reaches.  It names the first rank that ends without a goodbye, and asks
# the ranks regularly what they do.
#
# A rank's end is seen in the order of these: its connection closes, its pidfd
# becomes readable, its state in /proc is that of a zombie.  The connection
# comes first, as Linux closes what was opened last before what the launcher
# reads; a goodbye that was sent before counts.  Of two ends that are seen at
# once the first is the one that epoll has first: so it is asked for the
# closing alone, by a file of its own, as a rank that has said something would
# come before one that has closed.  How the process ended is in
# /proc while nobody has waited for it, and later behind its pidfd (Linux
# 6.15).  The launcher kills the other ranks then, so that it may look, on
# their nodes, as if one of those had died first: who names a death waits until
# all others have seen one, or for a second, and prints what no launcher does,
# or else what was seen first.
#
# Each watchdog has a connection to that of the lowest rank, on which lines of
# JSON travel: what it knows of its ranks goes up, and the one on top judges
# (``stall.py``) and speaks.  If the way up is lost, all judge for themselves.
# The watchdog knows no MPI and imports the standard library only, to start
# quickly and to stay small.
from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .stack import Frame, as_text, before_wait, call, frames_of_dump, place
from .stall import (
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    WAITS,
    WORKS,
    RankView,
    StallRule,
    StallSettings,
)

_PERIOD = 1.0           # seconds between two looks, at most
_PART = 8               # periods in a limit, at least
_UNHEARD = 6            # periods without an answer
_LATE = 3               # periods without a message of a watchdog
_DETAILS = 4            # periods without an update
_LINK = 2.0             # seconds that a message may take besides
_OTHERS = 1.0           # seconds for an earlier death elsewhere to be heard of
_TOGETHER = 1.0         # seconds in which a signal to all ends a second rank
_DYING = 1.0            # seconds from the end of a line to that of a process
_STATUS = 0.1           # seconds to wait for how a process ended
_CONNECTING = 10.0
_LONGEST = 60_000       # bytes of a text that are handed to a rank
_LONGEST_STACK = 8000   # characters
_MOST_WAITING = 1 << 22     # bytes that a connection may be behind
_OWN = struct.Struct('=iII')    # struct ucred: process, user, group
_PIDFD_GET_INFO = 0xC040FF0B        # <linux/pidfd.h>
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct('=Q52xi')     # the mask, and the wait status at 60


class WatchdogJob(NamedTuple):
    """What a watchdog is started with.

    Attributes:
        number: Of the watchdog; the rank that has started it.
        starter: That rank's process.
        size: Ranks of the job.
        settings: When it stands still.
        lines: The file of the socket that ranks connect to.
        links: That of the socket that other watchdogs connect to; -1: none.
        token: By which those are known.
    """

    number: int
    starter: int
    size: int
    settings: StallSettings
    lines: int
    links: int
    token: str


def main() -> None:
    """The program; its last argument is a :class:`WatchdogJob`."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)   # ranks may live on
    with contextlib.suppress(OSError):          # such as: not permitted here
        Watchdog(WatchdogJob(*json.loads(sys.argv[-1]))).run()
    os._exit(0)


# --- a rank ------------------------------------------------------------------

class WatchedRank:
    """A rank's process, its line to the watchdog, and what it has said.

    Attributes:
        pid: Number of the process, which is watched from now on.
        pidfd: Becomes readable when the process ends; None if the system has
            no such file, or the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(pid)
        self.line: socket.socket | None = None
        self.closing: int | None = None     # of the line: see ends only
        self.is_closed = False      # the line
        self.is_over = False
        self.left = False           # it has said goodbye
        self.rank, self.who = -1, ''
        self.asked = self.heard = self.updated = 0.0        # when
        self.said: dict[str, Any] = {}
        # The signal that has it write its stack, and to which of its files.
        self._dump = 0, 0

    # --- its process

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
        end = time.monotonic() + _STATUS
        while True:
            fields = self._fields()
            if fields[:1] == ['Z'] and int(fields[-1]):     # 0: maybe refused
                return int(fields[-1])
            info = array.array('B', _INFO.pack(_PIDFD_INFO_EXIT, 0))
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.pidfd or -1, _PIDFD_GET_INFO, info)
                mask, status = _INFO.unpack(info)
                if mask & _PIDFD_INFO_EXIT:
                    return status
            if time.monotonic() > end:
                return None
            time.sleep(1e-3)

    def has_ended_by(self, ready: int) -> bool:
        """Whether it has ended, or is ending, after an event on a file."""
        # Not if it has become another program (os.execv).
        return not self.is_over and (ready == self.pidfd or (
            ready == self.closing and self.is_gone()))

    def _fields(self) -> list[str]:
        """Of /proc, from the state on; [] if the process is gone."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/stat') as file:
            return file.read().rpartition(')')[2].split()
        return []

    # --- what it says

    def hear(self, message: dict[str, Any], now: float) -> None:
        """Takes what the rank says of itself."""
        if 'who' in message:
            self.rank, self.who = message['rank'], message['who']
            self.heard = self.updated = now
            self._dump = message['dump'] or (0, 0)
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
        view = RankView(self.rank, self.who, SILENT)
        frames = [Frame(*frame) for frame in self.said.get('stack', ())]
        state = self.state()
        if self.left:
            return view._replace(state=LEFT, details='its program has ended')
        if state in ('', 'Z', 'X'):
            return view._replace(state=GONE, details='its process has ended')
        if state == 'T':
            return view._replace(state=STOPPED, details=(
                f'at {place(frames)}' * bool(frames)))
        if state == 't':
            return view._replace(details='a debugger holds its process')
        if is_silent:
            return self._held(view, state)
        view = view._replace(state=WORKS, updates=self.said.get('updates', -1))
        if 'stack' not in self.said:
            return view
        called, where = call(frames), f'at {place(frames)}'
        view = view._replace(details=where, call=f'{called} {where}',
                             stack=as_text(before_wait(frames) or frames))
        moves = str(self.said['moves'])
        if self.said['waits']:
            text, ranks = self.said['waits'][0]
            return view._replace(
                state=WAITS, details=f'for {text}; {where}', waits_for=ranks,
                moves=text + moves)
        if not called:
            return view
        outside = called.startswith('MPI') and self.said['outside']
        return view._replace(
            state=WAITS, moves=moves, outside=outside, details=f'in {called}'
            + ', maybe for a process outside of the job' * outside
            + f'; {where}')

    def _held(self, view: RankView, state: str) -> RankView:
        """Of a rank in which no thread can answer: what a signal has written.
        """
        frames = frames_of_dump(self._written_stack())
        self._ask_for_stack()       # for the next time
        if not frames:
            return view._replace(details=(
                f'its process is there (state {state}), but a library keeps '
                'the interpreter from other threads'))
        called, where = call(frames), f'at {place(frames)}'
        view = view._replace(stack=as_text(frames), call=f'{called} {where}')
        if called.startswith('MPI'):
            return view._replace(state=WAITS, outside=True,
                                 details=f'in {called}; {where}')
        return view._replace(details='a library keeps the interpreter from '
                             f'other threads, {where}')

    def _written_stack(self) -> str:
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/fd/{self._dump[1]}') as file:
            return file.read()[-_LONGEST_STACK:] if self._dump[0] else ''
        return ''

    def _ask_for_stack(self) -> None:
        number = self._dump[0]
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/status') as file:
            caught = file.read().partition('SigCgt:')[2].split()[0]
            # Without a handler it would end the process.
            if number and int(caught, 16) >> number - 1 & 1:
                os.kill(self.pid, number)


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


# --- other watchdogs ---------------------------------------------------------

class WatchdogLink:
    """A connection to another watchdog, on which lines of JSON travel.

    Attributes:
        views: Of the ranks there, as it has said last.
        usual: Seconds of an update there.
        can_end: A rank there can end the job.
        heard: When.
    """

    def __init__(self, connection: socket.socket, is_known: bool) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.is_closed = False
        self.is_known = is_known        # it has shown its token
        self.views: list[RankView] = []
        self.usual, self.can_end = 0.0, False
        self.heard = time.monotonic()
        self._read = self._unsent = b''

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; does not wait, and drops it if there are many."""
        if len(self._unsent) < _MOST_WAITING:
            self._unsent += json.dumps(message).encode() + b'\n'
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(
                self._unsent, socket.MSG_NOSIGNAL):]

    def receive(self, token: str) -> list[dict[str, Any]]:
        """Messages that have come, of one who knows the token."""
        try:
            while data := self.connection.recv(1 << 16):
                self._read += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._read = self._read.split(b'\n')
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                message = json.loads(line)
                self.is_known |= message.get('token') == token
                if self.is_known:
                    self.heard = time.monotonic()
                    found.append(message)
        if not self.is_known and (lines or len(self._read) > 1000):
            self.is_closed = True       # another program
        return found

    def views_now(self, is_lost: bool) -> list[RankView]:
        """Of the ranks there; ``is_lost``: nothing comes from there."""
        return [_unknown(view, self.is_closed) if is_lost or self.is_closed
                else view for view in self.views]


def _unknown(view: RankView, is_closed: bool) -> RankView:
    """Of a rank from whose node nothing comes any more."""
    if view.state == LEFT:
        return view
    view = view._replace(waits_for=(), call='', stack='')
    if is_closed:
        return view._replace(state=SILENT,
                             details='the watchdog of its host has ended')
    return view._replace(state=GONE, details=(
        'nothing is heard of its host: that or the way there is lost'))


# --- the watch ---------------------------------------------------------------

class Watchdog:
    """Watches the ranks of a node, until all have ended.

    Args:
        job: See there.
    """

    def __init__(self, job: WatchdogJob) -> None:
        self._job = job
        self._epoll = select.epoll()
        self._listeners = [socket.socket(fileno=file) for file in (
            job.lines, job.links) if file >= 0]
        for listener in self._listeners:
            listener.setblocking(False)
            self._epoll.register(listener, select.EPOLLIN)
        self._ranks: dict[int, WatchedRank] = {}      # by process
        self._links: list[WatchdogLink] = []       # to those below
        self._up: WatchdogLink | None = None
        self._above: tuple[int, str] | None = None      # number, in words
        settings = StallSettings(*job.settings)
        self._watches_stalls = settings.seconds != 0
        self._period = min(_PERIOD, (settings.limit(0.0) or _PERIOD) / _PART)
        self._unheard = _UNHEARD * self._period
        self._rule = StallRule(settings, self._unheard + _LINK)
        self._is_ending = False
        # It must not outlive its starter, connected or not.
        self._add(job.starter)

    def run(self) -> None:
        """Watches."""
        due = 0.0
        while not all(rank.is_over for rank in self._ranks.values()) or (
                due and self._alive()):
            looks = self._watches_stalls and not self._is_ending
            self._handle(self._epoll.poll(
                max(due - time.monotonic(), 0.0) if looks else self._period))
            if looks and time.monotonic() >= due:
                due = time.monotonic() + self._period
                self._look(time.monotonic())

    # --- what comes in

    def _handle(self, events: Sequence[tuple[int, int]]) -> None:
        """Handles events, in the order in which they happened."""
        seen = time.time()
        # A goodbye that was sent before an end counts.
        self._meet()
        self._hear()
        # Those that had ended before they could be watched; of these, one
        # that no launcher has killed.
        unwatched = [rank for rank in self._ranks.values() if not rank.is_over
                     and rank.pidfd is None and rank.is_gone(0.0)]
        for rank in sorted(unwatched, key=lambda rank:
                           rank.status() == signal.SIGKILL):
            self._ended(rank, seen)
        for ready, _ in events:
            for rank in self._ranks.values():
                if rank.has_ended_by(ready):
                    self._ended(rank, seen)
            for link in [*self._links, *filter(None, [self._up])]:
                if not link.is_closed and link.connection.fileno() == ready:
                    self._read(link)

    def _meet(self) -> None:
        """Accepts new connections."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                while True:
                    made, _ = listener.accept()
                    if listener is not self._listeners[0]:
                        self._links.append(WatchdogLink(made, False))
                        self._epoll.register(made, select.EPOLLIN)
                        continue
                    pid, user, _ = _OWN.unpack(made.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, _OWN.size))
                    # 0: of another PID namespace, which cannot be watched.
                    if pid and user == os.geteuid():
                        made.setblocking(False)
                        rank = self._add(pid)
                        rank.line, rank.closing = made, os.dup(made.fileno())
                        self._epoll.register(made, select.EPOLLIN)
                        self._epoll.register(rank.closing, select.EPOLLHUP
                                             | select.EPOLLONESHOT)

    def _add(self, pid: int) -> WatchedRank:
        """The rank of a process; watches the process from now on."""
        rank = self._ranks.get(pid)
        if rank is None:
            rank = self._ranks[pid] = WatchedRank(pid)
            if rank.pidfd is not None:
                self._epoll.register(rank.pidfd, select.EPOLLIN)
        return rank

    def _hear(self) -> None:
        """Reads all messages of ranks."""
        now = time.monotonic()
        for rank in self._ranks.values():
            with contextlib.suppress(BlockingIOError):
                while rank.line and not rank.is_closed:
                    try:
                        data = rank.line.recv(1 << 18)
                    except ConnectionResetError:
                        data = b''
                    if data:
                        self._heard(rank, json.loads(data), now)
                    else:
                        rank.is_closed = True
                        self._epoll.unregister(rank.line)

    def _heard(self, rank: WatchedRank, message: dict[str, Any], now: float
               ) -> None:
        if message.get('goodbye'):
            rank.left = True
        elif message.get('all end'):
            self._all_end()
        elif 'lead' in message:
            self._follow(*message['lead'])
        else:
            rank.hear(message, now)

    def _read(self, link: WatchdogLink) -> None:
        """Reads what another watchdog has sent."""
        for message in link.receive(self._job.token):
            if 'views' in message:
                link.views = [RankView(*view) for view in message['views']]
                link.usual = message['usual']
                link.can_end = message['can end']
            elif 'died' in message:
                self._name(*message['died'], heard_from=link)
            elif 'end' in message:
                self._end(message['end'])
            elif message.get('all end'):
                self._all_end()
        if link.is_closed:
            self._epoll.unregister(link.connection)

    def _follow(self, number: int, words: str, hosts: Sequence[str],
                port: int, token: str) -> None:
        """Connects to a watchdog of a lower number, while others go on."""
        if self._above or number >= self._job.number:
            return
        self._above = number, words

        def connect() -> None:
            for host in hosts:
                with contextlib.suppress(OSError):
                    link = WatchdogLink(socket.create_connection(
                        (host, port), _CONNECTING), True)
                    link.send({'token': token})
                    self._epoll.register(link.connection, select.EPOLLIN)
                    self._up = link
                    return
        import threading  # only for several nodes

        threading.Thread(target=connect, daemon=True).start()

    def _leader(self) -> WatchdogLink | None:
        return self._up if self._up and not self._up.is_closed else None

    def _alive(self) -> list[WatchdogLink]:
        """Of those below."""
        now = time.monotonic()
        return [link for link in self._links
                if link.is_known and not link.is_closed and (
                    not self._watches_stalls
                    or now - link.heard < self._unheard + _LINK)]

    # --- ends

    def _ended(self, rank: WatchedRank, seen: float) -> None:
        """A rank's process has ended."""
        rank.is_over = True
        for file in (rank.pidfd, rank.closing,
                     None if rank.is_closed else rank.line):
            if file is not None:
                self._epoll.unregister(file)
        if rank.left or not rank.who:
            return
        status = rank.status()
        number = os.WTERMSIG(status) if status is not None else 0
        if number == signal.SIGINT or number == signal.SIGTERM and (
                not self._others_are_killed()):
            os._exit(0)         # somebody has ended the whole job
        self._name(number in (0, signal.SIGKILL, signal.SIGTERM), seen,
                   f'\nchainer_fp8pipe: {rank.who} {in_words(status)} in the '
                   f'middle of the job ({time.strftime("%H:%M:%S")})\n')

    def _others_are_killed(self) -> bool:
        """Whether the next rank that ends is killed: by the launcher.

        Launchers that have lost a rank use SIGKILL; those that end a job
        begin with SIGTERM.
        """
        end = time.monotonic() + _TOGETHER
        others = [rank for rank in self._ranks.values() if not rank.is_over]
        while time.monotonic() < end:
            for rank in others:
                if rank.is_gone(0.0):
                    status = rank.status()
                    return status is not None and (
                        os.WTERMSIG(status) == signal.SIGKILL)
            time.sleep(1e-3)
        return False

    def _name(self, maybe_killed: bool, at: float, text: str, *,
              heard_from: WatchdogLink | None = None) -> None:
        """Says who has died first, here or at the top; ends the watch.

        Args:
            maybe_killed: The launcher may have done it.
            at: When it was seen.
            text: About it.
            heard_from: Where it was seen, if not here.
        """
        found = [(maybe_killed, at, text)]
        end = time.monotonic() + _OTHERS * (2 if self._above else 1)
        while self._above and not self._up and time.monotonic() < end:
            time.sleep(1e-3)        # it is connecting
        up = self._leader()
        if up:
            up.send({'died': found[0]})
        silent = [up] if up else [
            link for link in self._alive() if link is not heard_from]
        while silent and time.monotonic() < end:
            for link in tuple(silent):
                died = []
                for message in link.receive(self._job.token):
                    if message.get('all end'):
                        self._all_end()
                    elif 'died' in message:
                        died.append(tuple(message['died']))
                if link is up and link.is_closed:
                    self._all_end()
                if died or link.is_closed:
                    silent.remove(link)
                found += died
            time.sleep(1e-3)
        _print(min(found)[2])
        self._all_end()

    def _all_end(self) -> None:
        """All ranks end, and it has been said why."""
        for link in [self._up, *self._links]:
            if link and not link.is_closed:
                link.send({'all end': True})
        os._exit(0)

    # --- stalls

    def _look(self, now: float) -> None:
        """Asks the ranks, and judges or hands on what is known of them."""
        ranks = [rank for rank in self._ranks.values() if rank.who]
        for rank in ranks:
            rank.ask(now, now - rank.updated > _DETAILS * self._period)
        views = [rank.view(now - rank.heard > self._unheard)
                 for rank in ranks]
        longest = self._unheard + _LINK
        for link in self._links:
            views += link.views_now(now - link.heard > longest)
            if link.is_known and not link.is_closed:
                link.send({})
        views.sort(key=lambda view: view.rank)
        usual = max([0.0, *(rank.said.get('usual', 0.0) for rank in ranks),
                     *(link.usual for link in self._links)])
        if up := self._leader():
            up.send({
                'views': views, 'usual': usual,
                'can end': any(map(self._can_end, ranks)) or any(
                    link.can_end for link in self._alive())})
            if now - up.heard <= longest:
                return
        if any(now - link.heard > _LATE * self._period
               for link in self._alive()):
            return              # it is late, or lost: that is known soon
        is_complete = len(views) == self._job.size
        if self._up and self._above:
            # The rest of the job is behind that one.
            number, words = self._above
            views.append(_unknown(RankView(number, words, SILENT),
                                  self._up.is_closed))
        found = self._rule.look(now, views, usual, is_complete)
        if found and found[0]:
            self._end(found[1])
        elif found:
            _print(found[1])

    def _can_end(self, rank: WatchedRank) -> bool:
        return bool(rank.line and not rank.left and not rank.is_closed
                    and rank.state() in ('R', 'S', 'D')
                    and time.monotonic() - rank.heard < self._unheard)

    def _end(self, text: str) -> None:
        """Has some rank end the job; if none can, kills those here."""
        self._is_ending = True
        for rank in filter(self._can_end, self._ranks.values()):
            with contextlib.suppress(OSError):
                assert rank.line
                rank.line.send(b'end ' + text.encode(
                    errors='replace')[-_LONGEST:], socket.MSG_NOSIGNAL)
                return
        for link in self._alive():
            if link.can_end:
                link.send({'end': text})
                return
        _print(text + 'no rank can do that: they are killed\n')
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)
        self._all_end()


def _print(text: str) -> None:
    with contextlib.suppress(OSError):          # nobody reads it
        os.write(2, text.encode(errors='replace'))
