"""Begins to watch ranks: whether they die, and whether they stand still."""
# Each node has a process beside the ranks, the watchdog (``watchdog/``).  A
# thread of each rank answers its questions: how many updates there were, where
# the main thread is and what it waits for.  Nothing of this costs an update
# more than a counter: the thread sleeps in ``recv`` until it is asked, once a
# second, and looks at the stack only where no update was finished for some
# seconds.  No job depends on the watchdog: there is none on systems other than
# Linux, or where it cannot be started.
from __future__ import annotations

import ast
import collections
import contextlib
import faulthandler
import fcntl
import functools
import gc
import json
import linecache
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Hashable
from types import FrameType
from typing import Any

from mpi4py import MPI

from .agreement import raise_together
from .finalizing import before_finalize, keep_forever
from .waiting import current_waits
from .watchdog.process import WatchdogJob
from .watchdog.stall import (
    EXIT_CODE,
    Frame,
    StallSettings,
    before_wait,
    described,
    settings_of_environment,
)

#: The environment variable that, as ``0``, has no watchdog started.
SWITCH = 'CHAINER_FP8PIPE_WATCHDOG'

_LAST = 64              # durations that are remembered of each kind of update
_SECONDS = 1.0          # to connect, at most
_BACKLOG = 1024         # ranks that may connect before the watchdog is up
# A process that dies closes what it opened last first, Linux being so.  This
# is above what the launcher reads, so that the watchdog knows before it does.
_LOWEST_FD = 200
_MOST_FRAMES = 100
_STUCK = 20             # seconds that MPI_Abort may take
_PART = 10_000          # objects that are looked through at a time
_SIOCGIFADDR = 0x8915   # <linux/sockios.h>


class UpdateCount:
    """The updates that this rank has finished, and how long they take.

    Attributes:
        total: How many; written by the main thread alone.
    """

    def __init__(self) -> None:
        self.total = 0
        self._latest: dict[Hashable, float] = {}
        self._durations: dict[Hashable, collections.deque[float]] = {}

    def finished(self, kind: Hashable) -> None:
        """Counts an update.

        Args:
            kind: Updates of one kind follow each other at regular times: a
                communicator's of one model, for example.
        """
        now = time.monotonic()
        if kind in self._latest:
            self._durations.setdefault(
                kind, collections.deque(maxlen=_LAST)).append(
                    now - self._latest[kind])
        self._latest[kind] = now
        self.total += 1

    def usual_seconds(self) -> float:
        """The median duration, of the kind of update that takes longest."""
        return max((statistics.median(tuple(durations)) for durations
                    in tuple(self._durations.values())), default=0.0)


#: Of this process.
updates = UpdateCount()


def watch(comm: MPI.Comm, role: str = '') -> None:
    """Watches these ranks from now on; call it on all of them.

    A rank that dies without a word is named by the watchdog of its node, and
    so is one that others wait for in vain.

    Args:
        comm: The ranks.
        role: This rank's part in the job for messages, such as ``'stage 0'``;
            '' keeps that of an earlier call, at first ``'worker'``.

    Raises:
        ValueError: An environment variable has a value that is not allowed;
            on all ranks.
    """
    if comm.size == 1:
        return
    settings = comm.bcast(raise_together(comm, settings_of_environment,
                                         ValueError))
    _own.role = role or _own.role
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        possible, found = zip(*node.allgather(
            (_is_possible(), (_own.address, _own.lead))), strict=True)
        place = next((one for one in found if one[0]), None)
        if place is None and True in possible:
            starter = possible.index(True)
            place = node.bcast(
                _start(settings, node.size < MPI.COMM_WORLD.size)
                if node.rank == starter else None, starter)
    finally:
        node.Free()
    if place and not _own.address and _is_possible():
        _own.connect(*place)
    world = MPI.COMM_WORLD
    _own.say({'rank': world.rank, 'dump': _dump(), 'who': (
        f'rank {world.rank} of {world.size} ({_own.role}), process '
        f'{os.getpid()} on host {os.uname().nodename},')})
    leads = [lead for lead in comm.allgather(place and place[1]) if lead]
    if leads:
        _own.say({'lead': min(leads)})


def say_that_all_end() -> None:
    """Tells the watchdog that this rank, which has said why, ends the job."""
    _own.say({'all end': True})


def _is_possible() -> bool:
    # Missing on other systems.
    return (hasattr(socket, 'SO_PEERCRED') and hasattr(os, 'pidfd_open')
            and os.path.exists('/proc/self/fd')
            and bool(sys.executable) and os.environ.get(SWITCH) != '0')


def _start(settings: StallSettings, has_others: bool
           ) -> tuple[bytes, list[Any]] | None:
    """Starts a watchdog, without waiting for it; None if that fails.

    Returns:
        The address for ranks; and for other watchdogs its number, what it is
        in words, its hosts, port and token; [] if there are no others.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        lines = stack.enter_context(socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET))
        lines.bind('')          # Linux then finds a name, and no file
        lines.listen(_BACKLOG)
        files, lead = [lines.fileno()], []
        rank, token = MPI.COMM_WORLD.rank, secrets.token_hex(8)
        if has_others:
            links = stack.enter_context(socket.socket())
            links.bind(('', 0))
            links.listen(_BACKLOG)
            files.append(links.fileno())
            lead = [rank, f'rank {rank} with others on host '
                    f'{os.uname().nodename},', _own_addresses(),
                    links.getsockname()[1], token]
        job = WatchdogJob(rank, os.getpid(), MPI.COMM_WORLD.size, settings,
                          files[0], files[1] if has_others else -1, token)
        # Kept, as Popen warns when a process is freed before it ends.
        keep_forever(subprocess.Popen(
            job.command(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, cwd='/', pass_fds=files,
            start_new_session=True))
        return lines.getsockname(), lead
    return None


def _own_addresses() -> tuple[str, ...]:
    """IPv4 addresses by which other hosts may reach this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     name.encode()[:15].ljust(40, b'\0'))
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(host for host in dict.fromkeys(found)
                 if not host.startswith('127.'))


@functools.cache
def _dump() -> tuple[int, int] | None:
    """A signal that has this process write its stack, and to which file."""
    with contextlib.suppress(AttributeError, OSError, ValueError,
                             RuntimeError):
        number = int(signal.SIGRTMAX - 5)       # which nobody else uses
        # What is restored when the interpreter ends: a rank that is in
        # MPI_Finalize by then must not die of the question.
        signal.signal(number, signal.SIG_IGN)
        file = os.memfd_create('stack of a rank')
        faulthandler.register(number, file, all_threads=False)
        return number, file
    return None


class _OwnRank:
    """This rank, as its watchdog hears of it.

    Attributes:
        role: Its part in the job.
        address: Of its watchdog; b'' if there is none.
        lead: How other watchdogs find that one.
    """

    def __init__(self) -> None:
        self.role, self.address = 'worker', b''
        self.lead: list[Any] = []
        self._socket: socket.socket | None = None
        self._moves = ''
        self._outside: bool | None = None       # None: not known yet

    def connect(self, address: bytes, lead: list[Any]) -> None:
        """Connects to a watchdog, if that is possible."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as low:
            low.settimeout(_SECONDS)
            try:
                low.connect(address)
                line = socket.socket(fileno=fcntl.fcntl(
                    low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD))
            except OSError:
                return
        line.setblocking(True)
        self.address, self.lead, self._socket = address, lead, line
        # A fork must not speak for the rank, nor seem to be it.
        os.register_at_fork(after_in_child=self._close)
        before_finalize(lambda: self.say({'goodbye': True}))
        threading.Thread(target=self._serve, args=[line], name='watchdog',
                         daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        """Says something to the watchdog, if there is one."""
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps(message).encode() + b'\n',
                                  socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def report(self, has_details: bool) -> dict[str, Any]:
        """Describes this rank by attributes of a :class:`.RankView`."""
        said = {'updates': updates.total, 'usual': updates.usual_seconds()}
        if not has_details:
            return said
        frames = _frames()
        stack = [Frame(frame.f_code.co_filename, frame.f_lineno or 0,
                       frame.f_code.co_name) for frame in frames]
        if stack:
            stack[-1] = stack[-1]._replace(method=_method(frames[-1]))
        waiting = before_wait(stack)
        # In a loop, one wait may follow another in the same place.
        moves = str(hash((tuple(waiting), *(
            id(value) for frame in frames[:len(waiting)]
            for value in _variables(frame)))))
        waits = current_waits()
        found = described(stack, waits, moves)
        if not waits and found['call'].startswith('MPI') and (
                self._may_wait_for_others(frames, moves)):
            found = described(stack, (), moves, outside=True)
        return said | found

    def _close(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def _serve(self, line: socket.socket) -> None:
        """The thread: answers questions."""
        asked = b''
        with contextlib.suppress(OSError):
            while data := line.recv(1 << 18):
                *questions, asked = (asked + data).split(b'\n')
                for question in map(json.loads, questions):
                    if 'end' in question:
                        _end(question['end'])
                        continue
                    try:
                        said = self.report(question['details'])
                    except Exception:   # what it looks at may change meanwhile
                        said = self.report(False)
                    self.say(said)

    def _may_wait_for_others(self, frames: list[FrameType], moves: str
                             ) -> bool:
        """Whether this rank may wait for a process outside of the job."""
        if self._moves != moves:
            self._moves, self._outside = moves, None
            return True         # to find out takes time: not while it moves
        if self._outside is None:
            self._outside = (MPI.Comm.Get_parent() != MPI.COMM_NULL
                             or _has_intercomm(frames))
        return self._outside


_own = _OwnRank()


def _end(text: str) -> None:
    """Ends all ranks, from the thread that answers."""
    # MPI may be stuck, too.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(_STUCK, exit=True)
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        from .abort import end_all_ranks  # which imports this module

        end_all_ranks(text, EXIT_CODE)
    else:
        say_that_all_end()
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(EXIT_CODE)     # on which launchers end the others


# --- the main thread, as seen from another one -------------------------------

def _frames() -> list[FrameType]:
    """The main thread's, from the outermost on; the last ones."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _variables(frame: FrameType) -> tuple[Any, ...]:
    # To look at those of a frame in a debugger would undo what that sets.
    return () if frame.f_trace else (*frame.f_locals.values(),)


def _method(frame: FrameType) -> str:
    """The method that a frame is calling; '' if that cannot be told.

    Python says from 3.11 on where in a line it is.
    """
    with contextlib.suppress(AttributeError, SyntaxError, ValueError,
                             TypeError, IndexError):
        positions: Any = getattr(frame.f_code, 'co_positions', list)
        first, last, start, stop = [*positions()][frame.f_lasti // 2]
        lines = [line.encode() for line in linecache.getlines(
            frame.f_code.co_filename, frame.f_globals)[first - 1:last]]
        lines[-1] = lines[-1][:stop]
        lines[0] = lines[0][start:]
        node: Any = ast.parse(b'(' + b''.join(lines) + b')', mode='eval').body
        return node.func.attr       # AttributeError if it is no such call
    return ''


def _has_intercomm(frames: list[FrameType]) -> bool:
    """Whether something in this process refers to an intercommunicator."""
    objects = gc.get_objects()
    values = [value for frame in frames for value in _variables(frame)]
    parts = [values, gc.get_referents(*values), *(
        gc.get_referents(*objects[start:start + _PART])
        for start in range(0, len(objects), _PART))]
    # Python's collector does not know dictionaries of simple objects.
    return any(_is_intercomm(one) or type(one) is dict and (
        not gc.is_tracked(one)) and any(map(_is_intercomm, one.values()))
        for part in parts for one in part)


def _is_intercomm(one: Any) -> bool:
    # By its class alone: to ask a dead proxy raises.
    return issubclass(type(one), MPI.Intercomm) and one != MPI.COMM_NULL
