"""The watchdog: a process beside the ranks that says why a job ends."""
# A rank that is killed prints nothing, and its launcher kills all others; a
# rank that is stopped cannot say so, nor can one whose interpreter a library
# holds.  So each node has a process of its own session, which no signal to
# the ranks reaches.  It knows no MPI and imports the standard library only, to
# start quickly and to stay small: Python runs this file.
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
# Stalls.  A job stands still for as long as some rank waits for others and
# nothing changes: no rank finishes an update, or begins or ceases to wait, and
# none that waits moves on, in what it waits for or in its main thread.  A rank
# that does something else (it computes, reads, sleeps, waits for a debugger or
# for an MPI process outside of the job) may go on by itself, so that a job
# with such a rank is only warned, unless the user has given seconds.  Nothing
# counts before the first update, and no time in which the watchdog itself did
# not run.  Every rank that waits has a reason not to go on.  The cause are
# those that have none: ranks that are stopped or gone, ranks that do something
# else, and, where all wait, ranks that wait in another call than most.
#
# One kind of line, JSON, leads to ranks and to other watchdogs.  Each of those
# has one to the watchdog of the lowest rank: what is known of ranks goes up,
# as a RankView each, and the one on top judges and speaks.  If the way up is
# lost, all judge for themselves.
from __future__ import annotations

import array
import collections
import contextlib
import fcntl
import json
import math
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

#: The environment variable with the seconds without an update after which a
#: job stands still; 0: never; not set: what :class:`StallSettings` says.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: The one that says what happens then: ``end`` or ``warn``.
ACTION = 'CHAINER_FP8PIPE_ON_STALL'
#: Exit code of a job that was ended because it stood still: that of a failure
#: that may be over when the job is started again (``EX_TEMPFAIL`` of
#: ``<sysexits.h>``).
EXIT_CODE = 75

_LEAST = 30.0           # seconds without an update, at least
_UPDATES = 20           # usual updates
# So many times the limit must be over while it is less certain that a job
# stands still.
_DEADLOCK = 4           # all ranks wait; one long message looks alike
_WORK = 10              # some rank does something that others wait for
_MOST = 16              # ranks that are printed
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


class StallSettings(NamedTuple):
    """What the environment variables say.

    Without a number of seconds a job stands still after 20 usual updates, and
    30 seconds at least, if a rank is stopped or gone; if all ranks wait, it
    may be for one long message, and after four times as long.  If a rank does
    something else, it may be a long evaluation: after ten times as long there
    is a warning, and the job goes on.  Seconds that are given are those of all
    of this, and the job ends.

    Attributes:
        seconds: Given; None: as above; 0: nothing is watched.
        ends: The job ends; else there is a warning.
        least: Seconds that are waited for without ``seconds``, at least.
    """

    seconds: float | None = None
    ends: bool = True
    least: float = _LEAST

    def limit(self, usual: float) -> float:
        """Seconds without an update before anybody asks why.

        Args:
            usual: What an update usually takes.
        """
        if self.seconds is not None:
            return self.seconds
        return max(self.least, _UPDATES * usual)


def settings_of_environment() -> StallSettings:
    """The settings of this process.

    Raises:
        ValueError: A variable has a value that is not allowed.
    """
    text = os.environ.get(SECONDS, '').strip()
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f'the environment variable {SECONDS} must be '
                         f'seconds, 0 or more, not {text!r}')
    action = os.environ.get(ACTION, '').strip() or 'end'
    if action not in ('end', 'warn'):
        raise ValueError(f'the environment variable {ACTION} must be end or '
                         f'warn, not {action!r}')
    return StallSettings(seconds, action == 'end', _LEAST)


# --- where a rank is: its stack, from the outermost frame on -----------------

# Where this package waits, polling: what is further in changes all the time.
_WAITS = {('mpi/waiting.py', 'wait_until'), ('mpi/waiting.py', 'pause'),
          ('allreduce/engine.py', 'finish'), ('allreduce/engine.py', 'work'),
          ('exchange/reducer.py', 'taken')}
# Calls of MPI that wait for other ranks, by their methods in mpi4py.
_CALLS = frozenset((
    'Allgather', 'Allgatherv', 'Allreduce', 'Alltoall', 'Alltoallv',
    'Alltoallw', 'Barrier', 'Bcast', 'Dup', 'Exscan', 'Finalize', 'Gatherv',
    'Mprobe', 'Recv', 'Reduce_scatter', 'Reduce_scatter_block', 'Scatterv',
    'Send', 'Sendrecv', 'Split_type', 'Ssend', 'Waitall', 'Waitany',
    'Waitsome', 'allgather', 'allreduce', 'alltoall', 'barrier', 'bcast',
    'exscan', 'mprobe', 'sendrecv', 'ssend', 'waitall', 'waitany'))
# Others have methods of these names, too.
_COMMON = frozenset((
    'Free', 'Gather', 'Probe', 'Reduce', 'Scan', 'Scatter', 'Split', 'Wait',
    'gather', 'probe', 'recv', 'reduce', 'scan', 'scatter', 'send', 'wait'))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Frame(NamedTuple):
    """One of a stack's frames.

    Attributes:
        file: In which the function is.
        line: That it has come to.
        function: Its name.
        method: That the frame has called, if that is known; a compiled
            function has no frame of its own.
    """

    file: str
    line: int
    function: str
    method: str = ''


def frames_of_dump(text: str) -> list[Frame]:
    """The last stack that :mod:`faulthandler` has written; [] for none."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)',
                       text.rpartition('most recent call first')[2])
    return [Frame(file, int(line), function)
            for file, line, function in reversed(found)]


def before_wait(frames: Sequence[Frame]) -> list[Frame]:
    """Without what is inside a wait of this package's."""
    for number, frame in enumerate(frames):
        if frame.file.startswith(_OURS) and (
                frame.file[len(_OURS):], frame.function) in _WAITS:
            return [*frames[:number]]
    return [*frames]


def call(frames: Sequence[Frame]) -> str:
    """What the rank waits in; '' if it does not seem to wait.

    ``'MPI: Allreduce'``, or a function of this package's that called a wait.
    """
    kept = before_wait(frames)
    if len(kept) < len(frames):
        last = (kept or frames)[-1]
        return f'{os.path.basename(last.file)}:{last.function}'
    import linecache  # takes time that a watchdog does not have at its start

    last = frames[-1] if frames else Frame('', 0, '')
    knows_mpi = (f'{os.sep}chainermn{os.sep}' in last.file
                 or last.file.startswith(_OURS))
    names = _CALLS | _COMMON if knows_mpi else _CALLS
    methods = [last.method] if last.method else re.findall(
        r'\.(\w+)\(', linecache.getline(last.file, last.line))
    return next((f'MPI: {name}' for name in methods if name in names), '')


def described(frames: Sequence[Frame],
              waits: Sequence[tuple[str, Sequence[int]]] = (),
              moves: str = '', outside: bool = False) -> dict[str, Any]:
    """What a main thread does: attributes of a :class:`RankView`.

    Args:
        frames: Its stack.
        waits: What it has noted that it waits for, and the ranks.
        moves: Differs from look to look if it moves on.
        outside: A call of MPI may wait for no rank of the job.
    """
    import traceback

    kept, called = before_wait(frames) or frames, call(frames)
    # Users know their own code best.
    users = [frame for frame in kept if not _is_library(frame.file)]
    where = 'at the end of its main thread'
    if kept:
        last = (users or kept)[-1]
        where = (f'at {os.path.basename(last.file)}:{last.line} in '
                 f'{last.function}')
    said = {'state': WORKS, 'where': where, 'call': called,
            'stack': ''.join(traceback.format_list([
                traceback.FrameSummary(frame.file, frame.line, frame.function)
                for frame in kept]))}
    if waits:
        text, ranks = waits[0]
        return {**said, 'state': WAITS, 'details': f'for {text}',
                'waits_for': ranks, 'moves': text + moves}
    outside = outside and called.startswith('MPI')
    return {**said, 'state': WAITS, 'moves': moves, 'outside': outside,
            'details': f'in {called}' + ', maybe for a process outside of the '
            'job' * outside} if called else said


def _is_library(file: str) -> bool:
    return (file.startswith((_OURS, _LIBRARY, '<frozen'))
            or f'{os.sep}site-packages{os.sep}' in file)


# --- the cause ---------------------------------------------------------------

# The states of a rank; in messages they follow its name.
WAITS = 'waits for other ranks'
WORKS = 'does not wait for any rank'
STOPPED = 'is stopped (SIGSTOP, or a debugger)'
GONE = 'is gone'
SILENT = 'does not answer'
LEFT = 'has left the job'


class RankView(NamedTuple):
    """Says where a rank is and for whom it waits.

    Attributes:
        rank: Its number.
        who: The rank in words, with process and host.
        state: What it does; one of the above.
        details: More about that, in words.
        where: In its script.
        waits_for: Ranks that it waits for, as far as it knows.
        call: What it waits in; equal on ranks that are in the same call.
        updates: How many it has finished; -1: not known.
        usual: Seconds that one usually takes.
        moves: Differs from look to look if a rank that waits moves on.
        stack: As in a traceback.
        outside: What it waits for may be no rank of the job.
        can_end: It answers, and could end the job.
    """

    rank: int
    who: str
    state: str
    details: str = ''
    where: str = ''
    waits_for: Sequence[int] = ()
    call: str = ''
    updates: int = -1
    usual: float = 0.0
    moves: str = ''
    stack: str = ''
    outside: bool = False
    can_end: bool = False

    def words(self, after: str) -> str:
        """The state, and details after a colon or comma."""
        details = '; '.join(filter(None, (self.details, self.where)))
        return self.state + f'{after} {details}' * bool(details)


def find_cause(views: Iterable[RankView]) -> tuple[list[int], str, bool]:
    """The cause, from what is known of all ranks.

    Returns:
        The ranks that are the cause, [] if none differs from the others;
        lines about it; and whether the job cannot go on by itself, as no rank
        works that might be done some day.
    """
    views = list(views)
    awaited = {peer for view in views for peer in view.waits_for}
    broken = [view for view in views if view.state in (STOPPED, GONE, LEFT)]
    busy = [view for view in views if view.state in (WORKS, SILENT)]
    if broken and not (busy and all(view.state == LEFT for view in broken)):
        return *_cause(broken, 'gone or stopped'), True
    if busy:
        found = [view for view in busy if view.rank in awaited] or busy
        return *_cause(found, 'behind which others wait'), False
    # All ranks wait: who waits in another call than those behind it?
    ends = [view for view in views
            if view.rank in awaited and not view.waits_for]
    if ends:
        return *_cause(ends, 'for which others wait, in another call'), True
    groups: dict[tuple, list[RankView]] = collections.defaultdict(list)
    for view in views:
        groups[view.call, view.where, view.updates].append(view)
    largest = max(groups.values(), key=len, default=[])
    others = [view for view in views if view not in largest]
    if not others:
        return [], ('all ranks wait for each other in the same place: a '
                    'message was lost, or a link is down\n'
                    + _lines(views)), True
    if len(largest) > len(others):
        ranks, text = _cause(others, 'in another call than the others')
        return ranks, f'{text}the others:\n{_lines(largest)}', True
    return [view.rank for view in views], (
        'the ranks wait for each other in different calls, and no call is '
        f'that of most:\n{_lines(views)}'), True


def _cause(found: Sequence[RankView], why: str) -> tuple[list[int], str]:
    ranks = [view.rank for view in found]
    names = ', '.join(map(str, ranks[:_MOST])) + ', ...' * (
        len(ranks) > _MOST)
    return ranks, (f'the cause: rank{"s" * (len(ranks) > 1)} {names}, {why}:\n'
                   + _lines(found))


def _lines(views: Sequence[RankView]) -> str:
    return ''.join(
        f'  {view.who} {view.words(":")}\n' for view in views[:_MOST]) + (
            f'  and {len(views) - _MOST} more\n' * (len(views) > _MOST))


class StallRule:
    """Looks at all ranks again and again.

    Args:
        settings: Of the job.
        longest: Seconds between two looks; more, and the watchdog was
            stopped or late.
    """

    def __init__(self, settings: StallSettings, longest: float) -> None:
        self._settings, self._longest = settings, longest
        self._views: dict[int, RankView] = {}
        self._looked = self._since = 0.0
        self._updated: dict[int, float] = {}
        self._counts: dict[int, int] = {}       # of updates, at least
        self._told = ''             # of this stall: '', 'warn' or 'end'

    def look(self, now: float, views: Sequence[RankView], is_complete: bool
             ) -> tuple[bool, str] | None:
        """Looks once.

        Args:
            now: The time.
            views: Of all ranks that are known, in their order.
            is_complete: These are all ranks of the job.

        Returns:
            Whether the job is to end now, and what is to be printed; None:
            nothing is to be done.
        """
        was_late, self._looked = now - self._looked > self._longest, now
        for view in views:
            last = self._views.get(view.rank)
            count = self._counts.get(view.rank, -1)
            begins = last is None or was_late or view.updates > count
            if begins:
                self._updated[view.rank] = now
            if begins or last and (view.state != last.state or (
                    view.state == WAITS and view.moves != last.moves)):
                self._since, self._told = now, ''
            self._views[view.rank] = view
            self._counts[view.rank] = max(view.updates, count, 0)
        # Without those that make no updates, but sum for those that do.
        found = [view for view in self._views.values()
                 if view.updates or view.state != WAITS]
        if not any(view.state == WAITS for view in found) or not any(
                self._counts.values()):
            self._since, self._told = now, ''
            return None
        limit = self._settings.limit(max(view.usual for view in views))
        if now - self._since < limit:
            return None
        return self._judge(now, found, limit, is_complete)

    def _judge(self, now: float, views: Sequence[RankView], limit: float,
               is_complete: bool) -> tuple[bool, str] | None:
        ranks, text, is_certain = find_cause(views)
        is_certain = is_certain and is_complete and not any(
            view.outside for view in views if view.state == WAITS)
        awaited = {rank for view in views for rank in view.waits_for}
        is_broken = any(view.rank in ranks and (
            view.state in (STOPPED, GONE)
            or view.state == LEFT and view.rank in awaited) for view in views)
        is_given = self._settings.seconds is not None
        times = (1 if is_given or is_certain and is_broken else
                 _DEADLOCK if is_certain else _WORK)
        ends = self._settings.ends and (is_certain or is_given)
        told = 'end' if ends else 'warn'
        if now - self._since < limit * times or self._told in ('end', told):
            return None
        self._told = told
        still = min(now - self._updated[view.rank] for view in views
                    if self._counts[view.rank])
        return ends, (
            ''.join(self._line(now, view) for view in views[:_MOST])
            + f'\nchainer_fp8pipe: the job stands still: no rank has '
            f'finished an update for {still:.0f} seconds; {text}'
            + 'nothing is known of the other ranks of the job\n' * (
                not is_complete)
            + f'ending all ranks with exit code {EXIT_CODE}\n' * ends)

    def _line(self, now: float, view: RankView) -> str:
        count = self._counts[view.rank]
        before = f' ({"at least " * (view.updates < 0)}{count} before)'
        return (f'\nchainer_fp8pipe: {view.who} has finished no update for '
                f'{now - self._updated[view.rank]:.0f} seconds'
                + before * bool(count) + f'; it {view.words(",")}'
                + f'\n{view.stack}')


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
        """It is open, and no other program's."""
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

    def hear(self, message: dict[str, Any]) -> None:
        """Takes what the rank says of itself."""
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
        """What is known of it, if it has answered for so many seconds."""
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
        """Of a rank in which no thread can answer: what a signal has written.
        """
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
    """Of a rank from whose node nothing comes any more."""
    if view.state == LEFT:
        return view
    state, details = (
        (GONE, 'nothing is heard of its host: that or the way there is lost')
        if link.is_open else (SILENT, 'the watchdog of its host has ended'))
    return view._replace(state=state, details=details, where='', call='',
                         waits_for=(), stack='', can_end=False)


# --- the watch ---------------------------------------------------------------

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
        """What a line has brought, after what concerns all has been done."""
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
        """All ranks end, and it has been said why."""
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
        """Of all ranks that are known; asks for the next ones."""
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


if __name__ == '__main__':
    main()
