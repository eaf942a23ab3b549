"""The process: sees how ranks end, asks what they do, and speaks."""
# A rank that is killed prints nothing, and its launcher kills all others; a
# rank that is stopped cannot say so, nor can one whose interpreter a library
# holds.  So each node has a process of its own session, which no signal to
# the ranks reaches.  It knows no MPI and imports the standard library only, to
# start quickly and to stay small: Python runs this folder as a package of its
# own, which knows nothing of the one around it.
#
# Deaths.  A rank's end is seen in the order of these: its line closes, its
# pidfd becomes readable, its state in /proc is that of a zombie.  The line
# comes first, as Linux closes what was opened last before what the launcher
# reads; a goodbye that was sent before counts.  Of two ends that are seen at
# once the first is the one that epoll has first: so it is asked for the
# closing alone, by a file of its own, as a rank that has said something would
# come before one that has closed.  How the process ended is in /proc while
# nobody has waited for it, and later behind its pidfd (Linux 6.15).  The
# launcher kills the other ranks then, so that it may look, on their nodes, as
# if one of those had died first: who names a death waits until all others have
# seen one, or for a second, and prints what no launcher does, or else what was
# seen first.
#
# Stalls.  Each second ranks are asked what they do.  One that does not answer
# is described by what the system knows of it, and by the stack that a signal
# has it write.  What is known goes to a StallRule (``stall.py``); where that
# says so, some rank that still answers ends the job.
#
# One kind of line, JSON, leads to ranks and to other watchdogs.  Each of those
# has one to the watchdog of the lowest rank: what is known of ranks goes up,
# as a RankView each, and the one on top judges and speaks.  If the way up is
# lost, all judge for themselves.
from __future__ import annotations

import array
import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .stall import (
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    WORKS,
    RankView,
    StallRule,
    StallSettings,
    described,
    frames_of_dump,
)

# With the folder around this package behind the standard library.
_START = ('import sys; sys.path.append(sys.argv[1]); '
          'from watchdog.process import main; main()')
_PERIOD = 1.0           # seconds between two looks, at most
_PART = 8               # periods in a limit, at least
_UNHEARD = 6            # periods without an answer
_LATE = 3               # periods without a message of a watchdog
_DETAILS = 4            # periods without an update
_LINK = 2.0             # seconds that a message may take besides
_OTHERS = 1.0           # seconds for what ends other ranks to be heard of
_DYING = 1.0            # seconds from the end of a line to that of a process
_STATUS = 0.1           # seconds to wait for how a process ended
_CONNECTING = 10.0
_SOON = 0.01            # seconds between two looks at what is decided soon
_LONGEST = 60_000       # characters of a text that are handed to a rank
_LONGEST_STACK = 8000   # characters
_MOST_WAITING = 1 << 22     # bytes that a line may be behind
_PACKET = 1 << 18
_OWN = struct.Struct('=iII')    # struct ucred: process, user, group
_PIDFD_GET_INFO = 0xC040FF0B        # <linux/pidfd.h>
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct('=Q52xi')     # the mask, and the wait status at 60


# --- lines, and the ranks at their ends --------------------------------------

class Line:
    """A connection to a rank or another watchdog: lines of JSON, both ways.

    Attributes:
        heard: When something came last.
        views: What another watchdog has said of ranks.
        has_named: It has said who died there.
    """

    def __init__(self, connection: socket.socket, token: str = '') -> None:
        self.connection = connection
        connection.setblocking(False)
        self.is_open = True
        self.heard = time.monotonic()
        self.views: list[RankView] = []
        self.has_named = False
        self._token = token     # that must come first
        self._read = self._unsent = b''

    @property
    def is_known(self) -> bool:
        """Whether it is open, and has shown the token."""
        return self.is_open and not self._token

    def send(self, **message: Any) -> None:
        """Sends a message; does not wait, and drops it if there are many."""
        if len(self._unsent) < _MOST_WAITING:
            self._unsent += json.dumps(message).encode() + b'\n'
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(
                self._unsent, socket.MSG_NOSIGNAL):]

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come."""
        try:
            while data := self.connection.recv(_PACKET):
                self._read += data
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *texts, self._read = self._read.split(b'\n')
        if self._token and (texts or len(self._read) > len(self._token)):
            if texts[:1] != [self._token.encode()]:
                self.is_open = False
                return []
            del texts[0]
            self._token = ''
        if texts:
            self.heard = time.monotonic()
        return [json.loads(text) for text in texts]


class WatchedRank:
    """A rank's process, its line to the watchdog, and what it has said.

    Attributes:
        pid: Number of the process, which is watched from now on.
        pidfd: Becomes readable when the process ends; None if the system has
            no such file, or the process is gone.
        line: None until it has connected.
        closing: Another file of the line's, to see ends only.
        is_over: Its process has ended.
        left: It has said goodbye.
        who: In words; '' until it has said that.
        updated: When it has finished an update.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(pid)
        self.line: Line | None = None
        self.closing: int | None = None
        self.is_over = self.left = False
        self.who = ''
        self.updated = 0.0
        self._rank, self._asked = -1, 0.0
        self._said: dict[str, Any] = {}
        # The signal that has it write its stack, and to which of its files.
        self._dump = 0, 0

    def state(self) -> str:
        """The process's state, a letter as in /proc; '' if it is gone."""
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
        """The wait status with which it ended; None if not known."""
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
        """The fields of /proc/PID/stat from the state on; [] if it is gone."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/stat') as file:
            return file.read().rpartition(')')[2].split()
        return []

    def hear(self, message: dict[str, Any]) -> None:
        """Notes a message of the rank's."""
        now = time.monotonic()
        self.left |= 'goodbye' in message
        if 'who' in message:
            self._rank, self.who = message['rank'], message['who']
            self._dump, self.updated = message['dump'] or (0, 0), now
        elif 'updates' in message:
            if message['updates'] != self._said.get('updates'):
                self.updated = now
            self._said = message

    def ask(self, now: float, for_details: bool) -> None:
        """Asks what the rank does, unless it still has to answer."""
        if self.line and self.line.is_open and not self.left and (
                self._asked <= self.line.heard):
            self._asked = now
            self.line.send(details=for_details)

    def view(self, now: float, longest: float) -> RankView:
        """Describes the rank: its own words, if it still answers.

        Else what the system knows: after ``longest`` seconds of silence.
        """
        view = RankView(self._rank, self.who, SILENT,
                        usual=self._said.get('usual', 0.0))
        state = self.state()
        if self.left:
            return view._replace(state=LEFT, details='its program has ended')
        if state in ('', 'Z', 'X'):
            return view._replace(state=GONE, details='its process has ended')
        if state == 'T':
            return view._replace(state=STOPPED,
                                 where=self._said.get('where', ''))
        if state == 't':
            return view._replace(details='a debugger holds its process')
        if not self.line or now - self.line.heard > longest:
            return view._replace(**self._held(state))
        return view._replace(**{'state': WORKS, **self._said,
                                'can_end': self.line.is_open})

    def _held(self, state: str) -> dict[str, Any]:
        """Describes a rank that cannot answer, by the stack in its file."""
        number, file = self._dump
        written = ''
        if number:
            with contextlib.suppress(OSError), open(
                    f'/proc/{self.pid}/fd/{file}') as dump:
                written = dump.read()[-_LONGEST_STACK:]
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)       # for the next time
        frames = frames_of_dump(written)
        why = 'a library keeps the interpreter from other threads'
        if not frames:
            return {'details': f'its process is there (state {state}), but '
                    f'{why}'}
        said = described(frames, outside=True)
        if said['call'].startswith('MPI'):
            return said | {'details': f'in {said["call"]}'}
        return said | {'state': SILENT, 'details': why}


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


def _unknown(view: RankView, link: Line) -> RankView:
    """Describes a rank whose node's watchdog has fallen silent."""
    if view.state == LEFT:
        return view
    state, details = (
        (GONE, 'nothing is heard of its host: that or the way there is lost')
        if link.is_open else (SILENT, 'the watchdog of its host has ended'))
    return view._replace(state=state, details=details, where='', call='',
                         waits_for=(), stack='', can_end=False)


# --- the watch ---------------------------------------------------------------

class WatchdogJob(NamedTuple):
    """The argument of a watchdog's process.

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

    def command(self) -> list[str]:
        """The command that starts the watchdog; it inherits the files."""
        package = os.path.dirname(os.path.abspath(__file__))
        return [sys.executable, '-I', '-S', '-c', _START,
                os.path.dirname(package), json.dumps(self)]


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
        self._ranks: dict[int, WatchedRank] = {}    # by process
        self._links: list[Line] = []                # to those below
        self._up: Line | None = None
        self._above: tuple[int, str] | None = None      # number, in words
        settings = StallSettings(*job.settings)
        self._period = min(_PERIOD, (settings.limit(0.0) or _PERIOD) / _PART)
        self._unheard = _UNHEARD * self._period
        self._rule = StallRule(settings, self._unheard + _LINK)
        self._watches_stalls = settings.seconds != 0
        # Ends of ranks here: the signal, when that was seen, a text.
        self._ends: list[tuple[int, float, str]] = []
        # Of each node the first: whether a launcher may have done it, and as
        # above.
        self._deaths: list[tuple[bool, float, str]] = []
        self._is_named = self._is_handed_up = False
        self._limit = math.inf          # until that is settled
        # It must not outlive its starter, connected or not.
        self._add(job.starter)

    def run(self) -> None:
        """Watches."""
        due = 0.0
        while self._ends or self._deaths or not all(
                rank.is_over for rank in self._ranks.values()) or (
                    due and self._alive()):
            pause = self._period
            if self._ends or self._deaths:
                pause = _SOON
            elif self._watches_stalls:
                pause = max(due - time.monotonic(), 0.0)
            self._handle(self._epoll.poll(pause))
            now = time.monotonic()
            if self._ends or self._deaths:
                self._settle(now)
            elif self._watches_stalls and now >= due:
                due = now + self._period
                self._look(now)

    # --- what comes in

    def _handle(self, events: Sequence[tuple[int, int]]) -> None:
        """Handles events, in the order in which they happened."""
        seen = time.time()
        self._meet()
        # A goodbye that was sent before an end counts.
        for rank in self._ranks.values():
            for message in self._received(rank.line):
                rank.hear(message)
        for link in [*self._links, self._up]:
            self._received(link)
        for rank in self._ranks.values():
            # Some had ended before they could be watched.
            if not rank.is_over and rank.pidfd is None and rank.is_gone(0.0):
                self._ended(rank, seen)
        for ready, _ in events:
            for rank in self._ranks.values():
                if rank.has_ended_by(ready):
                    self._ended(rank, seen)

    def _meet(self) -> None:
        """Accepts new connections."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                while True:
                    made, _ = listener.accept()
                    if listener is not self._listeners[0]:
                        self._links.append(Line(made, self._job.token))
                        self._epoll.register(made, select.EPOLLIN)
                        continue
                    pid, user, _ = _OWN.unpack(made.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, _OWN.size))
                    # 0: of another PID namespace, which cannot be watched.
                    if pid and user == os.geteuid():
                        rank = self._add(pid)
                        rank.line, rank.closing = Line(made), os.dup(
                            made.fileno())
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

    def _received(self, line: Line | None) -> list[dict[str, Any]]:
        """Reads a line's messages, and acts on those that concern the job."""
        if line is None or not line.is_open:
            return []
        messages = line.receive()
        for message in messages:
            if 'views' in message:
                line.views = [RankView(*view) for view in message['views']]
            elif 'died' in message:
                line.has_named = True
                self._deaths.append(tuple(message['died']))
            elif 'end' in message:
                self._end(message['end'])
            elif 'all end' in message:
                self._all_end()
            elif 'lead' in message:
                self._follow(*message['lead'])
        if not line.is_open:
            self._epoll.unregister(line.connection)
        return messages

    def _follow(self, number: int, words: str, hosts: Sequence[str],
                port: int, token: str) -> None:
        """Connects to a watchdog of a lower number, while others go on."""
        if self._above or number >= self._job.number:
            return
        self._above = number, words

        def connect() -> None:
            for host in hosts:
                with contextlib.suppress(OSError):
                    made = socket.create_connection((host, port), _CONNECTING)
                    made.sendall(token.encode() + b'\n')
                    self._epoll.register(made, select.EPOLLIN)
                    self._up = Line(made)
                    return
        import threading  # only for several nodes

        threading.Thread(target=connect, daemon=True).start()

    def _alive(self) -> list[Line]:
        """Links to those below from which something comes."""
        now = time.monotonic()
        return [link for link in self._links if link.is_known and (
            not self._watches_stalls
            or now - link.heard < self._unheard + _LINK)]

    # --- ends

    def _ended(self, rank: WatchedRank, seen: float) -> None:
        """Notes that a rank's process has ended."""
        rank.is_over = True
        for file in (rank.pidfd, rank.closing):
            if file is not None:
                self._epoll.unregister(file)
        if rank.line and rank.line.is_open:
            rank.line.is_open = False
            self._epoll.unregister(rank.line.connection)
        if rank.who and not rank.left:
            status = rank.status()
            self._ends.append((
                0 if status is None else os.WTERMSIG(status), seen,
                f'\nchainer_fp8pipe: {rank.who} {in_words(status)} in the '
                f'middle of the job ({time.strftime("%H:%M:%S")})\n'))

    def _settle(self, now: float) -> None:
        """Says who has died first, as soon as that is known: here, or on top.

        Then the watch ends.  It ends in silence where somebody has ended the
        whole job.
        """
        if self._limit == math.inf:
            self._limit = now + _OTHERS * (2 if self._above else 1)
        is_late = now > self._limit
        if self._ends and not self._is_named:
            (number, at, text), *others = self._ends
            if number == signal.SIGTERM and not (others or is_late):
                return
            # Launchers that have lost a rank use SIGKILL; those that end a
            # job begin with SIGTERM.
            if number == signal.SIGINT or number == signal.SIGTERM and (
                    not others or others[0][0] != signal.SIGKILL):
                os._exit(0)
            self._is_named = True
            self._deaths.append((number in (0, signal.SIGKILL, signal.SIGTERM),
                                 at, text))
        if self._up and self._up.is_open:
            if not self._is_handed_up:
                self._is_handed_up = True
                self._up.send(died=min(self._deaths))
            is_awaited = True
        elif self._is_handed_up:
            self._all_end()
        else:       # it may still be connecting
            is_awaited = bool(self._above and not self._up) or any(
                not link.has_named for link in self._alive())
        if is_late or not is_awaited:
            _print(min(self._deaths)[2])
            self._all_end()

    def _all_end(self) -> None:
        """Ends the watch: all ranks end, and somebody has said why."""
        for link in [self._up, *self._links]:
            if link and link.is_open:
                link.send(**{'all end': True})
        os._exit(0)

    # --- stalls

    def _look(self, now: float) -> None:
        """Asks the ranks, and judges or hands on what is known of them."""
        views, longest = self._views(now), self._unheard + _LINK
        up = self._up
        if up and up.is_open:
            up.send(views=views)
            if now - up.heard <= longest:
                return
        if not views or any(now - link.heard > _LATE * self._period
                            for link in self._alive()):
            return              # one is late, or lost: that is known soon
        is_complete = len(views) == self._job.size
        if up and self._above:
            # The rest of the job is behind that one.
            views.append(_unknown(RankView(*self._above, SILENT), up))
        found = self._rule.look(now, views, is_complete)
        if found and found[0]:
            self._end(found[1])
        elif found:
            _print(found[1])

    def _views(self, now: float) -> list[RankView]:
        """Describes all known ranks, and asks them for the next time."""
        views = []
        for rank in self._ranks.values():
            if rank.who:
                rank.ask(now, now - rank.updated > _DETAILS * self._period)
                views.append(rank.view(now, self._unheard))
        for link in self._links:
            is_lost = not link.is_open or (
                now - link.heard > self._unheard + _LINK)
            views += [_unknown(view, link) if is_lost else view
                      for view in link.views]
            if link.is_known:
                link.send()
        return sorted(views, key=lambda view: view.rank)

    def _end(self, text: str) -> None:
        """Has some rank end the job; if none can, kills those here."""
        now = time.monotonic()
        self._watches_stalls = False
        for rank in self._ranks.values():
            if rank.line and rank.view(now, self._unheard).can_end:
                rank.line.send(end=text[-_LONGEST:])
                return
        for link in self._links:
            if link.is_known and any(view.can_end for view in link.views):
                link.send(end=text)
                return
        _print(text + 'no rank can do that: they are killed\n')
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)
        self._all_end()


def _print(text: str) -> None:
    with contextlib.suppress(OSError):          # nobody reads it
        os.write(2, text.encode(errors='replace'))


def main() -> None:
    """The program; its last argument is a :class:`WatchdogJob`."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)   # ranks may live on
    with contextlib.suppress(OSError):          # such as: not permitted here
        Watchdog(WatchdogJob(*json.loads(sys.argv[-1]))).run()
    os._exit(0)
