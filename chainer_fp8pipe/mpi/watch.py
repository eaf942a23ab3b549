"""The watch over a job: a thread of each rank says what the rank does."""
# A job stands still while ranks wait for others and nothing changes: no rank
# finishes an update, or begins or ceases to wait, and none that waits moves
# on.  Each rank's thread wakes once a second.  Where its rank has finished no
# update for some time, it asks the threads of all others what their ranks do.
# The lowest rank that asks judges, prints once what all have said and who has
# not answered, and ends the job with a code after which ``launch`` starts it
# again.  A rank that computes, reads or sleeps, in any of its threads, may go
# on by itself: such a job is only warned.
#
# Threads talk by datagrams (UDP).  MPI would need MPI_THREAD_MULTIPLE, a
# communicator that all ranks make together, and a library that still answers
# when a link is down.  A datagram may be lost, so questions are asked again;
# one that does not carry the token of its receiver is not read.  A thread
# cannot answer while a library holds the interpreter.  To others that looks as
# if the rank was stopped or its host lost, so the limit is longer.
from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import linecache
import math
import os
import re
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from mpi4py import MPI

from .agreement import raise_together
from .finalizing import before_finalize
from .waiting import current_waits

#: The environment variable with the seconds without an update after which a
#: job stands still; 0: nothing is watched.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: The one that says what happens then: ``end`` or ``warn``.
ACTION = 'CHAINER_FP8PIPE_ON_STALL'
#: Exit code of a job that stood still: a failure that may be over when the
#: job is started again (``EX_TEMPFAIL`` of ``<sysexits.h>``).
EXIT_CODE = 75

_TICK = 1.0             # seconds between looks
_LATE = 5.0             # between two looks: this process itself was stopped
_LEAST = 30.0           # seconds without an update, at least
_UPDATES = 20           # usual updates without one
# So many times the limit is waited for while it is less certain that a job
# stands still.
_UNCLEAR = 4            # all wait
_WORK = 10              # a rank works, or may be held by a library
_ANSWERS = 3.0          # seconds in which those that can answer have done so
_FRESH = 5.0            # seconds for which an answer holds
_GREETED = 4            # the lowest ranks know from the start who is heard
_GREETINGS = 30         # at most
_LAST = 64              # durations that are remembered of each kind
_MOST_RANKS, _MOST_FRAMES, _MOST_BYTES = 16, 60, 60_000
_STUCK = 20.0           # seconds that MPI_Abort may take
_SIOCGIFADDR = 0x8915   # <linux/sockios.h>

# What a rank does, in words that follow its name.
WAITS, WORKS = 'waits for other ranks', 'does not wait for any rank'
SILENT, LEFT = 'does not answer', 'has left the job'


class StallSettings(NamedTuple):
    """When a job counts as standing still, and whether it ends then.

    Attributes:
        seconds: Without an update; None: 20 usual updates, and 30 seconds at
            least; 0: nothing is watched.
        ends: The job ends; else there is a warning.
    """

    seconds: float | None = None
    ends: bool = True

    def limit(self, usual: float) -> float:
        """Seconds without an update, where one usually takes so many."""
        return (max(_LEAST, _UPDATES * usual) if self.seconds is None
                else self.seconds)


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
    return StallSettings(seconds, action == 'end')


class UpdateCount:
    """The updates that this rank has finished, and how long they take.

    Attributes:
        total: How many; written by the main thread alone.
    """

    def __init__(self) -> None:
        self.total = 0
        self._kind: Hashable = None
        self._at = 0.0
        self._after: dict[Hashable, collections.deque[float]] = {}

    def finished(self, kind: Hashable) -> None:
        """Counts an update.

        Args:
            kind: What follows an update of one kind takes regular times: a
                communicator's of one model, for example.
        """
        now = time.monotonic()
        if self.total:
            if len(self._after) > _LAST:        # a search makes new models
                self._after.clear()
            self._after.setdefault(
                self._kind, collections.deque(maxlen=_LAST)).append(
                    now - self._at)
        self._kind, self._at = kind, now
        self.total += 1

    def usual_seconds(self) -> float:
        """The median time from an update of the latest kind to the next one.

        However long the updates of other kinds take, and however rare they
        are.  0 while it is not known.
        """
        return statistics.median(tuple(self._after.get(self._kind, ())) or
                                 (0.0,))


#: Of this process.
updates = UpdateCount()


def watch(comm: MPI.Comm, role: str = '') -> None:
    """Watches these ranks from now on; call it on all of them.

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
    if settings.seconds != 0:
        _own.role = role or _own.role
        _own.begin(comm.allgather(_own.card()), settings)


# --- what this rank does -----------------------------------------------------

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
# A thread beside the main one has nothing to do where it has called these.
_IDLE = frozenset(('accept', 'acquire', 'get', 'join', 'poll', 'select',
                   'wait'))
_IDLE_FILES = ('threading.py', 'queue.py', 'selectors.py', 'socketserver.py',
               f'concurrent{os.sep}futures', 'multiprocessing', 'asyncio')
_OURS = os.path.abspath(f'{__file__}/../..') + os.sep
#: Threads of this package that move messages, and wait as the main one does.
_MOVERS = tuple(os.path.join(_OURS, name, '') for name in (
    'channel', 'exchange', 'allreduce'))
_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclasses.dataclass
class Doing:
    """What a rank does, in words for others.

    Attributes:
        state: One of the above.
        words: Details, and where.
        call: What it waits in; equal on ranks that are in the same call.
        waits_for: Ranks that it waits for, as far as it knows.
        moves: Differs from look to look if a rank that waits moves on.
        stack: As in a traceback.
    """

    state: str
    words: str = ''
    call: str = ''
    waits_for: Sequence[int] = ()
    moves: str = ''
    stack: str = ''

    def changing(self) -> tuple[str, str]:
        """What differs from look to look if a rank moves on."""
        return self.state, self.moves * (self.state == WAITS)


def doing() -> Doing:
    """What this rank does: its main thread, or another one that works."""
    own, main = threading.get_ident(), threading.main_thread().ident
    stacks = {thread: _frames(frame)
              for thread, frame in sys._current_frames().items()}
    found = _main_thread(stacks.get(main or 0, []))
    if found.state == WAITS:
        for thread, others in stacks.items():
            if thread not in (own, main) and others and not _is_idle(others):
                name = next((one.name for one in threading.enumerate()
                             if one.ident == thread), str(thread))
                return dataclasses.replace(
                    found, state=WORKS, words=f'its thread {name} works '
                    f'{_where(others)}; its main thread waits '
                    f'{found.words}', stack=_stack(others))
    return found


def _main_thread(frames: Sequence[FrameType]) -> Doing:
    kept = frames[:_depth(frames)]
    where, called = _where(kept or frames), ''
    stack = _stack(kept or frames)
    # In a loop, one wait may follow another in the same place.
    moves = str(hash(tuple(
        part for frame in kept for part in (
            frame.f_lasti, *map(id, _variables(frame))))))
    if waits := current_waits():
        text, ranks = waits[0]
        return Doing(WAITS, f'for {text}; {where}', '', tuple(ranks),
                     text + moves, stack)
    if len(kept) < len(frames):
        last = (kept or frames)[-1].f_code
        called = f'{os.path.basename(last.co_filename)}:{last.co_name}'
    elif name := _mpi_call(frames):
        called = f'MPI: {name}'
    if called:
        return Doing(WAITS, f'in {called}; {where}', called, (), moves, stack)
    return Doing(WORKS, where, stack=stack)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the outermost on; the last ones."""
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _depth(frames: Sequence[FrameType]) -> int:
    """How many frames there are before a wait of this package's."""
    return next((number for number, frame in enumerate(frames)
                 if (file := frame.f_code.co_filename).startswith(_OURS)
                 and (file[len(_OURS):].replace(os.sep, '/'),
                      frame.f_code.co_name) in _WAITS), len(frames))


def _is_idle(frames: Sequence[FrameType]) -> bool:
    """Whether a thread beside the main one has nothing to do, or waits."""
    file = frames[-1].f_code.co_filename
    return (any(frame.f_code.co_filename.startswith(_MOVERS)
                for frame in frames)
            or _depth(frames) < len(frames) or bool(_mpi_call(frames))
            or file.startswith(_LIBRARY)
            and file[len(_LIBRARY):].startswith(_IDLE_FILES)
            or bool(_IDLE & set(_methods(frames[-1]))))


def _mpi_call(frames: Sequence[FrameType]) -> str:
    """The call of MPI that waits; '' if there is none."""
    file = frames[-1].f_code.co_filename if frames else ''
    knows_mpi = file.startswith(_OURS) or f'{os.sep}chainermn{os.sep}' in file
    names = _CALLS | _COMMON if knows_mpi else _CALLS
    return next((name for name in _methods(frames[-1]) if name in names),
                '') if frames else ''


def _methods(frame: FrameType) -> list[str]:
    """The methods that a frame's line calls.

    A compiled function has no frame of its own.
    """
    return re.findall(r'\.(\w+)\(', linecache.getline(
        frame.f_code.co_filename, frame.f_lineno or 0))


def _variables(frame: FrameType) -> tuple[Any, ...]:
    # To look at those of a frame in a debugger would undo what that sets.
    return () if frame.f_trace else (*frame.f_locals.values(),)


def _where(frames: Sequence[FrameType]) -> str:
    """In the script; users know their own code best."""
    if not frames:
        return 'at the end of its main thread'
    users = [frame for frame in frames if not (
        (file := frame.f_code.co_filename).startswith(
            (_OURS, _LIBRARY, '<frozen'))
        or f'{os.sep}site-packages{os.sep}' in file)]
    last = (users or frames)[-1]
    return (f'at {os.path.basename(last.f_code.co_filename)}:{last.f_lineno} '
            f'in {last.f_code.co_name}')


def _stack(frames: Sequence[FrameType]) -> str:
    return ''.join(
        f'    {frame.f_code.co_filename}:{frame.f_lineno} in '
        f'{frame.f_code.co_name}\n' for frame in frames[-_MOST_RANKS:])


# --- the threads -------------------------------------------------------------

@dataclasses.dataclass
class Peer:
    """Another rank, as this one knows it.

    Attributes:
        rank: In its ``MPI.COMM_WORLD``.
        who: In words.
        addresses: Where its thread may be reached; that from which it was
            heard, once it was.
        token: It reads no datagram without.
        is_known: It was heard once.
        heard: When it last said what it does, and that.
    """

    rank: int
    who: str
    addresses: list[tuple[str, int]]
    token: str
    is_known: bool = False
    heard: tuple[float, dict[str, Any]] | None = None
    has_left: bool = False


class Watch:
    """This rank's thread.

    Attributes:
        role: The rank's part in the job.
    """

    def __init__(self) -> None:
        self.role = 'worker'
        self._peers: dict[str, Peer] = {}
        self._settings = StallSettings()
        self._token = secrets.token_hex(8)
        self._socket: socket.socket | None = None
        self._has_ended = False
        self._total = 0         # updates at the last look
        self._moved = ('', '')  # what has to change
        self._since = self._asks = 0.0
        self._asked = -math.inf     # when a lower rank last asked
        self._greetings = 0
        self._has_told = False

    def card(self) -> dict[str, Any]:
        """How others find this rank."""
        world = MPI.COMM_WORLD
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind(('', 0))
        port = self._socket.getsockname()[1]
        return dict(rank=world.rank, token=self._token,
                    who=f'rank {world.rank} of {world.size} ({self.role}), '
                    f'process {os.getpid()} on host {os.uname().nodename},',
                    addresses=[(host, port) for host in _own_addresses()])

    def begin(self, cards: Sequence[dict[str, Any]], settings: StallSettings
              ) -> None:
        """Watches more ranks; starts the thread."""
        self._settings = settings
        self._who = next(card['who'] for card in cards
                         if card['token'] == self._token)
        is_first = not self._peers
        for card in cards:
            if (token := card['token']) in self._peers:
                self._peers[token].who = card['who']
            elif token != self._token:
                # At once: the thread may be looking at them.
                self._peers = {**self._peers, token: Peer(**card)}
        self._greetings = 0
        if is_first:
            before_finalize(self.end)
            threading.Thread(target=self._serve, name='watch',
                             daemon=True).start()

    def end(self) -> None:
        """Tells all others that this rank leaves in order."""
        self._has_ended = True
        for _ in range(2):          # datagrams may be lost
            for peer in self._peers.values():
                self._tell(peer, left=True)

    def _serve(self) -> None:
        self._since = looked = time.monotonic()
        while not self._has_ended:
            # What it looks at may change meanwhile.
            with contextlib.suppress(Exception):
                self._hear(looked + _TICK)
            now = time.monotonic()
            was_late, looked = now - looked > _LATE, now
            with contextlib.suppress(Exception):
                self._look(now, was_late)

    def _hear(self, end: float) -> None:
        assert self._socket
        while not self._has_ended and (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data, source = self._socket.recvfrom(1 << 16)
                said = json.loads(data)
                peer = self._peers[said['from']]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if said.get('to') != self._token:
                continue
            peer.is_known, peer.addresses = True, [source]
            if 'left' in said:
                peer.has_left = True
            elif 'asks' in said:
                if said['asks'] and self._comes_before(peer):
                    self._asked = time.monotonic()
                self._tell(peer, **(self._answer() if said['asks'] else
                                    {'heard': True}))
            elif 'state' in said:
                peer.heard = time.monotonic(), said

    def _tell(self, peer: Peer, **said: Any) -> None:
        data = json.dumps({**said, 'from': self._token, 'to': peer.token}
                          ).encode()[:_MOST_BYTES]
        for address in peer.addresses:
            with contextlib.suppress(OSError):
                assert self._socket
                self._socket.sendto(data, tuple(address))

    def _comes_before(self, peer: Peer) -> bool:
        return (peer.rank, peer.token) < (MPI.COMM_WORLD.rank, self._token)

    def _answer(self) -> dict[str, Any]:
        """What this rank does."""
        found, quiet = doing(), time.monotonic() - self._since
        # It may have moved since its thread last looked: slow data are there.
        if (updates.total, found.changing()) != (self._total, self._moved):
            quiet = 0.0
        return {**vars(found), 'rank': MPI.COMM_WORLD.rank,
                'who': self._who, 'quiet': quiet, 'updates': updates.total}

    def _look(self, now: float, was_late: bool) -> None:
        self._greet()
        if was_late or updates.total != self._total:
            self._total, self._moved = updates.total, ('', '')
            self._begin_again(now)
            return
        if (moved := doing().changing()) != self._moved:
            self._moved = moved
            self._begin_again(now)
            return
        quiet = now - self._since
        limit = self._settings.limit(updates.usual_seconds())
        if quiet < limit or now - self._asked < _FRESH or not (
                updates.total or any(peer.has_left
                                     for peer in self._peers.values())):
            self._asks = 0.0
            return
        self._asks = self._asks or now
        for peer in self._peers.values():
            if not peer.has_left:
                self._tell(peer, asks=True)
        if now - self._asks >= _ANSWERS:
            self._judge(now, quiet, limit)

    def _begin_again(self, now: float) -> None:
        self._since, self._asks, self._has_told = now, 0.0, False

    def _greet(self) -> None:
        """Finds out whether datagrams come through at all."""
        self._greetings += 1
        if self._greetings <= _GREETINGS:
            for peer in sorted(self._peers.values(),
                               key=lambda one: one.rank)[:_GREETED]:
                if not peer.is_known:
                    self._tell(peer, asks=False)

    def _judge(self, now: float, quiet: float, limit: float) -> None:
        views = [self._answer()]
        given = self._settings.seconds is not None
        cannot_tell = False
        for peer in self._peers.values():
            if peer.heard and now - peer.heard[0] < _FRESH and (
                    not peer.has_left):
                views.append(peer.heard[1])
                continue
            cannot_tell |= not (peer.is_known or peer.has_left)
            views.append({
                'rank': peer.rank, 'who': peer.who, 'updates': -1,
                'quiet': math.inf, 'stack': '', 'call': '', 'waits_for': (),
                'state': LEFT if peer.has_left else SILENT,
                'words': '' if peer.has_left else
                'stopped, gone, held by a library, or its host is lost'})
        verdict = find_cause(sorted(views, key=lambda one: one['rank']),
                             limit, given)
        if verdict is None:
            return
        text, factor, is_certain = verdict
        if cannot_tell and not given:
            factor, is_certain = _WORK, False
        if quiet < limit * factor:
            return
        ends = is_certain and self._settings.ends
        if self._has_told and not ends:
            return
        self._has_told = True
        head = (f'\nchainer_fp8pipe: the job stands still: no rank has '
                f'finished an update for {quiet:.0f} seconds; ')
        if ends:
            _end(head + text + f'ending all ranks with exit code {EXIT_CODE}'
                 '\n')
        else:
            sys.stderr.write(head + text + 'the job goes on, as it may go on '
                             f'by itself; {SECONDS}=N or --stall N ends it\n')
            sys.stderr.flush()


_own = Watch()


def _end(text: str) -> None:
    """Ends all ranks, from the thread."""
    # MPI may be stuck, too; launchers end the others on this exit.
    stuck = threading.Timer(_STUCK, os._exit, [EXIT_CODE])
    stuck.daemon = True
    stuck.start()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        from .world import end_all_ranks  # which imports this module

        end_all_ranks(text, EXIT_CODE)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _own_addresses() -> list[str]:
    """IPv4 addresses by which others may reach this host."""
    found = ['127.0.0.1']
    with contextlib.suppress(OSError), socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):      # it has none; not Linux
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     struct.pack('40s', name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(found)]


# --- the cause ---------------------------------------------------------------

def find_cause(views: Sequence[dict[str, Any]], limit: float, given: bool
               ) -> tuple[str, float, bool] | None:
    """The cause, from what is known of all ranks.

    Args:
        views: Of all ranks: what :class:`Doing` has, and ``rank``, ``who``,
            ``updates`` and ``quiet``.
        limit: Seconds without an update.
        given: By the user, who then has the job end in any case.

    Returns:
        Lines about it; how many limits must be over; and whether the job
        ends then.  None if it does not stand still.
    """
    # Without those that make no updates, but sum for those that do.
    found = [view for view in views
             if view['updates'] or view['state'] != WAITS]
    if any(view['quiet'] < limit for view in found):
        return None
    awaited = {rank for view in found for rank in view['waits_for']}
    busy = [view for view in found if view['state'] == WORKS]
    left = [view for view in found if view['state'] == LEFT]
    if left and len(left) + len(busy) == len(found):
        return None         # nobody waits: the last one plots, say
    if left and not busy:
        return _said(found, left, 'which others wait for'), 1, True
    if silent := [view for view in found if view['state'] == SILENT]:
        return (_said(found, silent, 'behind which others wait'),
                _UNCLEAR if given else _WORK, True)
    if busy:
        named = [view for view in busy if view['rank'] in awaited] or busy
        return (_said(found, named, 'behind which others wait'),
                1 if given else _WORK, given)
    # All ranks wait: who waits in another call than those behind it?
    factor = 1 if given else _UNCLEAR
    ends = [view for view in found
            if view['rank'] in awaited and not view['waits_for']]
    if ends:
        return _said(found, ends, 'for which others wait, in another call'
                     ), factor, True
    groups: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    for view in found:
        groups[view['call'], view['words'], view['updates']].append(view)
    largest = max(groups.values(), key=len, default=[])
    others = [view for view in found if view not in largest]
    if len(largest) > len(others) > 0:
        return (_said(found, others, 'in another call than the others'),
                factor, True)
    return _said(found, [], 'all ranks wait for each other in '
                 + ('different calls' if others else 'the same place: a '
                    'message was lost, or a link is down')
                 ), factor, True


def _said(views: Sequence[dict[str, Any]], cause: Sequence[dict[str, Any]],
          why: str) -> str:
    """Lines: the cause, and what each rank does."""
    names = ', '.join(str(view['rank']) for view in cause[:_MOST_RANKS])
    head = (f'the cause: rank{"s" * (len(cause) > 1)} {names}, {why}:\n'
            if cause else f'{why}:\n')
    shown = [*cause, *(view for view in views if view not in cause)]
    return head + ''.join(
        f'  {view["who"]} {view["state"]}'
        + f': {view["words"]}' * bool(view['words']) + '\n'
        + view['stack'] * (view in cause) for view in shown[:_MOST_RANKS]
    ) + f'  and {len(shown) - _MOST_RANKS} more\n' * (
        len(shown) > _MOST_RANKS)
