"""The watch over a job: a thread of each rank notices that all stand still."""
# A job stands still while ranks wait for others and nothing changes: no rank
# finishes an update, or begins or ceases to wait, and none that waits moves
# on.  Where its rank has not moved on for some time, a thread tells all others
# what the rank does, and so does each that hears of it.  The lowest rank that
# has spoken judges, prints once what all have said and who has not answered,
# and ends the job with a code after which ``launch`` starts it again.
#
# A rank waits if none of its threads can go on before another rank does
# something: the main thread is in a wait of this package or in a method of one
# of mpi4py's objects, and every other thread too, or has nothing to do.  What
# is not known to wait may act: it computes, reads or sleeps.  Such a job may
# go on by itself and is only warned, unless the user has set the time after
# which it ends.  A rank cannot answer while a library holds the interpreter,
# so the limit is longer for one that does not.
from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import linecache
import math
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from mpi4py import MPI

from ..report.launch_protocol import STILL
from . import waiting
from .agreement import raise_together
from .finalizing import HeldRequest, before_finalize
from .world import end_all_ranks, stderr

#: The environment variable with the seconds without an update after which a
#: job ends; 0: nothing is watched.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: Exit code of a job that stood still: a failure that may be over when the
#: job is started again (``EX_TEMPFAIL`` of ``<sysexits.h>``).
EXIT_CODE = 75
#: States, in words that follow a rank's name.
WAITS, WORKS = 'waits for other ranks', 'does not wait for any rank'
SILENT, LEFT = 'does not answer', 'has left the job'

_TICK = 1.0             # seconds between looks, and of hearing when leaving
_LEAST = 120.0          # seconds without an update, at least
_UPDATES = 80           # usual updates without one
#: So many times as long where a rank may act, or a library may hold it.
_LONGER = 3
#: For which a message holds, and others have to answer; or between two looks:
#: this process itself was stopped.
_FRESH = 6.0

#: Who calls for the parameters in the first update.
_OPTIMIZERS = 'chainermn.optimizers'
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.abspath(f'{__file__}/../..') + os.sep
#: Frames in these poll; a thread there only moves messages of this package.
_MOVERS = tuple(os.path.join(_OURS, name, '') for name in (
    'channel', 'exchange', 'allreduce'))
#: Or where its last frame is in one of these.
_IDLE = tuple(_LIBRARY + name for name in (
    'threading.py', 'queue.py', 'selectors.py', 'socketserver.py',
    f'concurrent{os.sep}futures', 'multiprocessing', 'asyncio'))
#: A call, as far as it tells of which object the method is.
_CALL = re.compile(r'\s*(?:(?:[\w, ]+=|return)\s)?\s*([\w.]+)\.(\w+)\s*\(')


#: What helps where a rank is at another place than the others.
_ALIKE = ('  all ranks must do the same updates: give them equally many '
          'batches, and have all leave the training after the same one\n')


class View(NamedTuple):
    """The state that a rank reports to the others."""

    rank: int           # in MPI.COMM_WORLD
    who: str            # in words
    #: WAITS, WORKS or LEFT; where it is SILENT, the others say so.
    state: str = SILENT
    #: And where; equal on ranks that are in the same call.
    words: str = 'stopped, gone, held by a library, or its host is lost'
    waits_for: tuple[int, ...] = ()     # as far as it knows
    moves: int = 0      # differs if a rank that waits moves on
    updates: int = -1   # that it has finished
    limits: float = math.inf    # without a change, in times the limit


def doing(view: View) -> View:
    """What this rank does now, but for the thread that asks."""
    stacks = {thread: [one for one, _ in traceback.walk_stack(frame)][::-1]
              for thread, frame in sys._current_frames().items()}
    stacks.pop(threading.get_ident())
    main = threading.main_thread().ident or 0
    frames = stacks.pop(main, [])
    call, ranks = _call(main, frames)
    words = f'{call}; {_where(frames)}' if call else _where(frames)
    for thread, stack in stacks.items() if call else ():
        if not _is_idle(thread, stack):
            name = next((one.name for one in threading.enumerate()
                         if one.ident == thread), thread)
            return view._replace(state=WORKS, words=f'its thread {name} may '
                                 f'act, {_where(stack)}; its main thread '
                                 f'waits {words}')
    if not call:
        return view._replace(state=WORKS, words=words)
    # In a loop, one wait may follow another in the same place; frames that
    # poll differ from look to look.
    return view._replace(
        state=WAITS, words=words, waits_for=ranks, moves=hash((call, *(
            # Python 3.10 orders them anew at a second look.
            (frame.f_lasti, frozenset((name, id(value)) for name, value
                                      in frame.f_locals.items()))
            for frame in _outside(frames)
            if not _file(frame).startswith(_MOVERS)))))


def _is_idle(thread: int, frames: Sequence[FrameType]) -> bool:
    return (bool(_call(thread, frames)[0])
            or _file(frames[-1]).startswith(_IDLE)
            or any(_file(frame).startswith(_MOVERS) for frame in frames))


def _call(thread: int, frames: Sequence[FrameType]
          ) -> tuple[str, tuple[int, ...]]:
    """In what a thread waits for other ranks, '' if it does not; and which."""
    if waits := waiting.current_waits(thread):
        return f'for {waits[0].text}' if waits[0].text else (
            f'in {_outside(frames)[-1].f_code.co_name}'), waits[0].ranks
    return _mpi_method(frames[-1]) if frames else '', ()


def _outside(frames: Sequence[FrameType]) -> list[FrameType]:
    """Without those in a wait."""
    return [*itertools.takewhile(
        lambda frame: _file(frame) != waiting.__file__, frames)]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _mpi_method(frame: FrameType) -> str:
    """The method of an object of mpi4py's that a frame is in; '' if none."""
    code, line, column = frame.f_code, frame.f_lineno, 0
    if hasattr(code, 'co_positions'):   # before 3.11 a line is all there is
        line, _, column, _ = [*code.co_positions()][frame.f_lasti // 2]
    found = _CALL.match(linecache.getline(
        code.co_filename, line or frame.f_lineno or 0).encode()[
            column or 0:].decode(errors='replace'))
    if not found:
        return ''
    first, *rest = found[1].split('.')
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:           # no property of the user's is called
        value = inspect.getattr_static(value, name, None)
    return f'in MPI: {found[2]}' * type(value).__module__.startswith('mpi4py')


def _where(frames: Sequence[FrameType]) -> str:
    """In the script; users know their own code best."""
    users = [frame for frame in frames if not (
        _file(frame).startswith((_OURS, _LIBRARY, '<frozen'))
        or f'{os.sep}site-packages{os.sep}' in _file(frame))]
    if not (last := [*frames, *users][-1:]):
        return 'at the end of its main thread'
    return (f'at {os.path.basename(_file(last[0]))}:{last[0].f_lineno} in '
            f'{last[0].f_code.co_name}')


class UpdateCount:
    """The updates that this rank has finished, and how long they take."""

    def __init__(self) -> None:
        self.total = 0
        self._last: tuple[Hashable, float] = None, 0.0
        # By kind of update, how many seconds what followed took.
        self._took: dict[Hashable, collections.deque[float]] = (
            collections.defaultdict(lambda: collections.deque(maxlen=64)))

    def finished(self, kind: Hashable) -> None:
        """Counts an update; what follows one of a kind takes equal times."""
        now = time.monotonic()
        if self.total:
            self._took[self._last[0]].append(now - self._last[1])
        self._last = kind, now
        self.total += 1

    def broadcast(self) -> None:
        """Counts an update of ChainerMN's that has sent parameters alone."""
        frame: FrameType | None = sys._getframe(1)
        while frame and _file(frame).startswith(_OURS):     # a report's, say
            frame = frame.f_back
        if frame and frame.f_globals['__name__'] == _OPTIMIZERS:
            self.finished('broadcast')

    def limit(self) -> float:
        """Seconds without an update that nobody expects.

        Of the median time after an update of the latest kind, however long
        those of other kinds take, or rare they are.
        """
        return max(_LEAST, _UPDATES * statistics.median(
            tuple(self._took[self._last[0]]) or [0.0]))


#: Of this process.
updates = UpdateCount()


class Watch:
    """This rank's thread."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        # The communicator, what is known of its ranks, and when they spoke.
        # The thread may look while they are set.
        self._group: tuple[MPI.Comm, list[View], list[float]] = (
            MPI.COMM_SELF, [], [])
        self._sent: list[HeldRequest] = []
        self._state: Any = None     # what has to change, and since when it
        self._since = 0.0           # has not
        self._began = math.inf      # to tell others
        self._judged: Any = None    # the state of the last verdict
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name='watch',
                                        daemon=True)

    def watch(self, comm: MPI.Comm) -> None:
        """Watches these ranks, if they are more than before.

        Call it on all of them.  Where MPI cannot be called by several threads,
        nothing is watched.  Raises ValueError, on all ranks, if the
        environment variable is wrong.
        """
        if comm.size == 1:
            return
        seconds = comm.bcast(raise_together(comm, _seconds, ValueError))
        if seconds == 0 or comm.allreduce(
                self._group[0].size, MPI.MAX) >= comm.size:
            return
        world = MPI.COMM_WORLD
        self._seconds, self._group = seconds, (comm.Dup(), comm.allgather(View(
            world.rank, f'rank {world.rank} of {world.size}, process '
            f'{os.getpid()} on host {os.uname().nodename},')),
            [-math.inf] * comm.size)
        if self._thread.ident is None:
            before_finalize(self._end)
            self._thread.start()

    def _end(self) -> None:
        """Tells all others that this rank leaves in order."""
        self._is_over.set()
        self._thread.join(_FRESH)
        comm, views, _ = self._group
        self._hear(start := time.monotonic())
        self._tell(views[comm.rank]._replace(
            state=LEFT, words=f'after {updates.total} updates'))
        # UCX warns of messages that nobody has received.
        while self._others() and (now := time.monotonic()) < start + _TICK:
            time.sleep(waiting.BRIEF)
            self._hear(now)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._is_over.wait(_TICK):
            # What it looks at may change meanwhile.
            with contextlib.suppress(Exception):
                self._look(now := time.monotonic(), now - looked > _FRESH)
            looked = now

    def _look(self, now: float, was_late: bool) -> None:
        comm, views, heard = self._group
        self._hear(now)
        own = doing(View(*views[comm.rank][:2]))
        state = updates.total, own.state, own.moves
        if was_late or state != self._state:
            self._state, self._since, self._judged = state, now, None
        quiet = now - self._since
        own = views[comm.rank] = own._replace(
            updates=updates.total, limits=quiet / (
                updates.limit() if self._seconds is None else self._seconds))
        heard[comm.rank] = now
        known = [view if view.state == LEFT or now - at < _FRESH
                 else View(view.rank, view.who)
                 for view, at in zip(views, heard, strict=True)]
        speak = [view for view in known if view.state not in (LEFT, SILENT)]
        if max(view.limits for view in speak) < 1 or not any(
                view.updates > 0 for view in known):
            self._began = math.inf
            return
        self._began = min(self._began, now)
        self._tell(own)
        if (now - self._began >= _FRESH and self._judged != state
                and own.rank == min(view.rank for view in speak)):
            self._judge(known, quiet)

    def _hear(self, now: float) -> None:
        comm, views, heard = self._group
        while comm.Iprobe():
            place, view = comm.recv()
            views[place], heard[place] = view, now

    def _others(self) -> list[int]:
        """Places of the ranks that have not left."""
        comm, views, _ = self._group
        return [place for place, view in enumerate(views)
                if place != comm.rank and view.state != LEFT]

    def _tell(self, view: View) -> None:
        comm = self._group[0]
        self._sent = [one for one in self._sent if not one.test()]
        self._sent += [HeldRequest(comm.isend((comm.rank, view), place))
                       for place in self._others()]

    def _judge(self, views: Sequence[View], quiet: float) -> None:
        text, ends = find_cause(sorted(views), self._seconds is not None)
        self._judged = self._state if text else None
        text = ('chainer_fp8pipe: the job stands still: no rank has '
                f'finished an update for {quiet:.0f} seconds; {text}')
        if ends:
            end_all_ranks(
                f'\n{text}ending all ranks with exit code {EXIT_CODE}\n',
                EXIT_CODE, STILL + text.partition('\n')[0].partition(': ')[2])
        elif self._judged:
            print(f'\n{text}the job goes on, as it may go on by itself; '
                  f'{SECONDS}=N ends it', file=stderr(), flush=True)


watch = Watch().watch


def _seconds() -> float | None:
    """What the user has set; None: nothing."""
    text = os.environ.get(SECONDS, '').strip()
    with contextlib.suppress(ValueError):
        if not text or 0 <= float(text) < math.inf:
            if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                return 0.0
            return float(text) if text else None
    raise ValueError(f'the environment variable {SECONDS} must be seconds, '
                     f'0 or more, not {text!r}')


def find_cause(views: Sequence[View], is_given: bool) -> tuple[str, bool]:
    """The cause and what each rank does, '' if the job does not stand still.

    And whether it ends: ``is_given`` says that the user has set the limit.
    """
    # Without those that make no updates, but sum for those that do.
    views = [view for view in views if view.updates or view.state != WAITS]
    left, silent, busy, waits = (
        [view for view in views if view.state == state]
        for state in (LEFT, SILENT, WORKS, WAITS))
    has_left = bool(left) and not busy
    is_slow = not has_left and bool(silent or busy and not is_given)
    if not (silent or waits) or (       # nobody waits: the last one plots, say
            min(view.limits for view in views) < (_LONGER if is_slow else 1)):
        return '', False
    awaited = {rank for view in views for rank in view.waits_for}
    calls = [(view.words, view.updates) for view in waits]
    usual = max(calls, key=calls.count, default=None)
    others = [view for view, call in zip(waits, calls, strict=True)
              if call != usual]
    behind = 'behind which others wait'
    cause, why = next((found for found in (
        (left * has_left, 'which others wait for'), (silent, behind),
        ([view for view in busy if view.rank in awaited], behind),
        (busy, behind),
        ([view for view in waits
          if view.rank in awaited and not view.waits_for],
         'for which others wait, in another call'),
        (others * (len(others) < len(waits) / 2),
         'in another call than the others')) if found[0]), (
        [], 'all ranks wait for each other in ' + (
            'different calls' if others else
            'the same place: a message was lost, or a link is down')))
    if cause:
        why = 'the cause: rank{} {}, {}'.format(
            's' * (len(cause) > 1),
            ', '.join(str(view.rank) for view in cause), why)
    return f'{why}:\n' + ''.join(
        f'  {view.who} {view.state}' + f': {view.words}' * bool(view.words)
        + '\n'
        for view in [*cause, *(one for one in views if one not in cause)]
    ) + _ALIKE * (has_left or bool(others) and not silent and not busy
                  ), is_given or bool(silent or not busy)
