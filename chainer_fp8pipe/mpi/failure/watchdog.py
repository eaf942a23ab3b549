"""The watchdog: a process beside the ranks that says why a job dies.

A rank that is killed prints nothing, and its launcher kills all others; a
rank that is stopped cannot say so, nor can one whose interpreter a library
holds.  So each node has a process of its own session, which no signal to the
ranks reaches.  It names the first rank that ends without a goodbye, and asks
the ranks regularly what they do.

The watchdogs of a job form a tree: each may have one connection up, to a
watchdog of a lower number.  What it knows goes up; the one on top judges
(:mod:`.stall`), and speaks.  If the way up is lost, all judge for
themselves.  The watchdog knows no MPI and imports the standard library only,
to start quickly and to stay small.
"""
from __future__ import annotations

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

from .stall import RankView, StallRule, StallSettings, State
from .watched_rank import WatchedRank, in_words

_PERIOD = 1.0           # seconds between two looks, at most
_PART = 8               # periods in a limit, at least
_UNHEARD = 6            # periods without an answer
_LATE = 3               # periods without a message of a watchdog
_DETAILS = 4            # periods without an update
_LINK = 2.0             # seconds that a message may take besides
_OTHERS = 0.2           # seconds for an earlier death elsewhere to be heard of
_TOGETHER = 1.0         # seconds in which a signal to all ends a second rank
_CONNECTING = 10.0
_LONGEST = 60_000       # bytes of a text that are handed to a rank
_OWN = struct.Struct('=iII')    # struct ucred: process, user, group


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


class Watchdog:
    """Watches the ranks of a node, until all have ended.

    Args:
        job: See there.
    """

    def __init__(self, job: WatchdogJob) -> None:
        self._job = job
        self._epoll = select.epoll()
        self._listener = socket.socket(fileno=job.lines)
        self._listeners = [self._listener]
        if job.links >= 0:
            self._listeners.append(socket.socket(fileno=job.links))
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

    # --- what comes in -------------------------------------------------------

    def _handle(self, events: Sequence[tuple[int, int]]) -> None:
        """Handles events, in the order in which they happened."""
        # A goodbye that was sent before an end counts.
        self._meet()
        self._hear()
        # Those that had ended before they could be watched; of these, one
        # that no launcher has killed.
        for rank in sorted(self._unwatched(), key=lambda rank:
                           rank.status() == signal.SIGKILL):
            self._ended(rank)
        for ready, _ in events:
            for rank in self._ranks.values():
                if not rank.is_over and _ends(rank, ready):
                    self._ended(rank)
            for link in [*self._links, *filter(None, [self._up])]:
                if not link.is_closed and link.connection.fileno() == ready:
                    self._read(link)

    def _unwatched(self) -> list[WatchedRank]:
        """Ranks that are gone, but no event says so."""
        return [rank for rank in self._ranks.values() if not rank.is_over
                and rank.pidfd is None and rank.is_gone(0.0)]

    def _meet(self) -> None:
        """Accepts new connections."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                while True:
                    made, _ = listener.accept()
                    if listener is not self._listener:
                        self._links.append(WatchdogLink(made, False))
                        self._epoll.register(made, select.EPOLLIN)
                        continue
                    pid, user, _ = _OWN.unpack(made.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, _OWN.size))
                    # 0: of another PID namespace, which cannot be watched.
                    if pid and user == os.geteuid():
                        made.setblocking(False)
                        self._epoll.register(made, select.EPOLLIN)
                        self._add(pid).line = made

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

    def _read(self, link: WatchdogLink) -> None:
        """Reads what another watchdog has sent."""
        for message in link.receive(self._job.token):
            if 'views' in message:
                link.views = [RankView(*view)._replace(state=State[view[2]])
                              for view in message['views']]
                link.usual = message['usual']
                link.can_end = message['can end']
            elif 'died' in message:
                self._name(*message['died'])
            elif 'end' in message:
                self._end(message['end'])
            elif message.get('all end'):
                self._all_end()
        if link.is_closed:
            self._epoll.unregister(link.connection)

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

    # --- ends ----------------------------------------------------------------

    def _ended(self, rank: WatchedRank) -> None:
        """A rank's process has ended."""
        rank.is_over = True
        for file in (rank.pidfd, None if rank.is_closed else rank.line):
            if file is not None:
                self._epoll.unregister(file)
        if rank.left or not rank.who:
            return
        status = rank.status()
        number = os.WTERMSIG(status) if status is not None else 0
        if number == signal.SIGINT or number == signal.SIGTERM and (
                not self._others_are_killed()):
            os._exit(0)         # somebody has ended the whole job
        self._name(number in (0, signal.SIGKILL, signal.SIGTERM), time.time(),
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

    def _name(self, maybe_killed: bool, at: float, text: str) -> None:
        """Says who has died first, here or at the top; ends the watch.

        The launcher kills the ranks of other nodes then, so that it may look
        as if one of those had died.  So the top waits a moment, and prints
        what no launcher does, or else what was seen first.

        Args:
            maybe_killed: The launcher may have done it.
            at: When it was seen.
            text: About it.
        """
        links, found = self._alive(), [(maybe_killed, at, text)]
        if self._is_led() and self._up:
            self._up.send({'died': found[0]})
            links = [self._up]
        end = time.monotonic() + _OTHERS * (1 + self._is_led())
        while links and time.monotonic() < end:
            for link in links:
                for message in link.receive(self._job.token):
                    if message.get('all end'):
                        self._all_end()
                    elif 'died' in message:
                        found.append(tuple(message['died']))
                if link is self._up and link.is_closed:
                    self._all_end()
            time.sleep(1e-3)
        _print(min(found)[2])
        self._all_end()

    def _all_end(self) -> None:
        """All ranks end, and it has been said why."""
        for link in [self._up, *self._links]:
            if link and not link.is_closed:
                link.send({'all end': True})
        os._exit(0)

    # --- stalls --------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Asks the ranks, and judges or hands on what is known of them."""
        ranks = [rank for rank in self._ranks.values() if rank.who]
        for rank in ranks:
            rank.ask(now, now - rank.updated > _DETAILS * self._period)
        views = [rank.view(now - rank.heard > self._unheard)
                 for rank in ranks]
        for link in self._links:
            is_lost = now - link.heard > self._unheard + _LINK
            views += [_unknown(view, link.is_closed) if is_lost
                      or link.is_closed else view for view in link.views]
            if link.is_known and not link.is_closed:
                link.send({})
        views.sort(key=lambda view: view.rank)
        usual = max([0.0, *(rank.said.get('usual', 0.0) for rank in ranks),
                     *(link.usual for link in self._links)])
        if self._is_led() and self._up:
            self._up.send({
                'views': [(*view[:2], view.state.name, *view[3:])
                          for view in views], 'usual': usual,
                'can end': any(map(self._can_end, ranks)) or any(
                    link.can_end for link in self._alive())})
            if now - self._up.heard <= self._unheard + _LINK:
                return
        self._judge(now, views, usual)

    def _judge(self, now: float, views: list[RankView], usual: float) -> None:
        if any(now - link.heard > _LATE * self._period
               for link in self._alive()):
            return              # it is late, or lost: that is known soon
        is_complete = len(views) == self._job.size
        if self._up and self._above:
            # The rest of the job is behind that one.
            number, words = self._above
            views.append(_unknown(RankView(
                number, words, State.SILENT), self._up.is_closed))
            is_complete = True
        decision = self._rule.look(now, views, usual, is_complete)
        if decision and decision.ends:
            self._end(decision.text)
        elif decision:
            _print(decision.text)

    def _can_end(self, rank: WatchedRank) -> bool:
        return (not rank.left and not rank.is_closed
                and rank.state() in ('R', 'S', 'D')
                and time.monotonic() - rank.heard < self._unheard)

    def _end(self, text: str) -> None:
        """Has some rank end the job; if none can, kills those here."""
        self._is_ending = True
        for rank in self._ranks.values():
            if rank.line and self._can_end(rank):
                with contextlib.suppress(OSError):
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

    # --- other watchdogs -----------------------------------------------------

    def _is_led(self) -> bool:
        return self._up is not None and not self._up.is_closed

    def _alive(self) -> list[WatchdogLink]:
        """Of those below."""
        now = time.monotonic()
        return [link for link in self._links
                if link.is_known and not link.is_closed and (
                    not self._watches_stalls
                    or now - link.heard < self._unheard + _LINK)]


def _ends(rank: WatchedRank, ready: int) -> bool:
    """Whether a rank has ended, or is ending, after an event on a file."""
    if rank.pidfd == ready:
        return True
    # Not if it has become another program (os.execv).
    return bool(rank.line and rank.is_closed
                and rank.line.fileno() == ready and rank.is_gone())


def _unknown(view: RankView, is_closed: bool) -> RankView:
    """Of a rank from whose node nothing comes any more."""
    if view.state is State.LEFT:
        return view
    view = view._replace(waits_for=(), call='', stack='')
    if is_closed:
        return view._replace(state=State.SILENT,
                             details='the watchdog of its host has ended')
    return view._replace(state=State.GONE, details=(
        'nothing is heard of its host: that or the way there is lost'))


def _print(text: str) -> None:
    with contextlib.suppress(OSError):          # nobody reads it
        os.write(2, text.encode(errors='replace'))


# --- other watchdogs ---------------------------------------------------------

_SIOCGIFADDR = 0x8915           # <linux/sockios.h>
_MOST_WAITING = 1 << 22         # bytes that a connection may be behind


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
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if not isinstance(message, dict):
                    continue
                self.is_known |= message.get('token') == token
                if self.is_known:
                    self.heard = time.monotonic()
                    found.append(message)
        if not self.is_known and (lines or len(self._read) > 1000):
            self.is_closed = True       # another program
        return found


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses by which other hosts may reach this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     name.encode()[:15].ljust(40, b'\0'))
                found.append(socket.inet_ntoa(answer[20:24]))
    if not found:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(socket.gethostname()))
    return tuple(host for host in dict.fromkeys(found)
                 if not host.startswith('127.'))
