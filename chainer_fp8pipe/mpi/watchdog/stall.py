"""Whether a job stands still, and which ranks are the cause."""
# A job stands still for as long as some rank waits for others and nothing
# changes: no rank finishes an update, or begins or ceases to wait, and none
# that waits moves on, in what it waits for or in its main thread.  A rank that
# does something else (it computes, reads, sleeps, waits for a debugger or for
# an MPI process outside of the job) may go on by itself, so that a job with
# such a rank is only warned, unless the user has given seconds.  Nothing
# counts before the first update, and no time in which the watchdog itself did
# not run.  Every rank that waits has a reason not to go on.  The cause are
# those that have none: ranks that are stopped or gone, ranks that do something
# else, and, where all wait, ranks that wait in another call than most.
#
# A rank describes itself by a RankView (``watch.py``); the watchdog does so
# for a rank that cannot answer, and judges all of them (``process.py``).
# Nothing here asks the system, and nothing but the standard library is
# imported, as the watchdog has no more.
from __future__ import annotations

import collections
import math
import os
import re
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


class StallSettings(NamedTuple):
    """When a job counts as standing still, and whether it ends then.

    The environment variables ``CHAINER_FP8PIPE_STALL`` (seconds) and
    ``CHAINER_FP8PIPE_ON_STALL`` (``end`` or ``warn``) set it.

    Without seconds a job stands still after 20 usual updates, and 30 seconds
    at least, if a rank is stopped or gone.  If all ranks wait, it may be for
    one long message: the job stands still after four times as long.  If a
    rank does something else, it may be a long evaluation: after ten times as
    long there is a warning, and the job goes on.  If seconds are given, the
    job ends after these in all three cases.

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
_OURS = os.path.abspath(f'{__file__}/../../..') + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Frame(NamedTuple):
    """A frame of a stack.

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
    """The call in which the rank waits; '' if it does not seem to wait.

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
    """Describes a main thread by attributes of a :class:`RankView`.

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
