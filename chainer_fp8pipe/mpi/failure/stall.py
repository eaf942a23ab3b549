"""When a job stands still, why, and what happens then: data and a clock."""
# A job stands still for as long as some rank waits for others and nothing
# changes: no rank finishes an update, or begins or ceases to wait, and none
# that waits moves on, in what it waits for or in its main thread.  A rank that
# does something else than wait for ranks (it computes, reads, sleeps, waits
# for a process, for a debugger, or for an MPI process outside of the job) may
# go on by itself, so a job with such a rank is only warned, unless the user
# has given seconds.  A rank that has ended waits for nobody.  Nothing counts
# before the first update, and no time in which the watchdog itself did not
# run.
#
# Every rank that waits for others has a reason not to go on.  The cause are
# those that have none: ranks that are stopped or gone, ranks that do something
# else, and, where all wait, ranks that wait in another call than most.
from __future__ import annotations

import collections
import enum
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: The environment variable with the seconds without an update after which a
#: job stands still; 0: never; not set: what :class:`StallSettings` says.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: The one that says what happens then: ``end`` or ``warn``.
ACTION = 'CHAINER_FP8PIPE_ON_STALL'
#: Exit code of a job that was ended because it stood still: that of a failure
#: that may be over when the job is started again (``EX_TEMPFAIL`` of
#: ``<sysexits.h>``).
EXIT_CODE = 75

_LEAST = 30.0           # seconds
_UPDATES = 20           # usual updates
# The same again as long as it is less certain that a job stands still.
_DEADLOCK = 4           # all ranks wait; one long message looks alike
_WORK = 10              # some rank does something that others wait for


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

    def patience(self, is_certain: bool, is_broken: bool) -> int:
        """How many times the limit must be over.

        Args:
            is_certain: No rank works that might be done some day.
            is_broken: A rank cannot go on at all.
        """
        if self.seconds is not None or (is_certain and is_broken):
            return 1
        return _DEADLOCK if is_certain else _WORK

    def ends_if(self, is_certain: bool) -> bool:
        """Whether the job ends, rather than that there is a warning."""
        return self.ends and (is_certain or self.seconds is not None)


def settings_of_environment() -> StallSettings:
    """The settings of this process.

    Raises:
        ValueError: A variable has a value that is not allowed.
    """
    text = os.environ.get(SECONDS, '').strip()
    seconds = None
    if text:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ValueError(f'the environment variable {SECONDS} must be '
                             f'seconds, 0 or more, not {text!r}')
    action = os.environ.get(ACTION, '').strip() or 'end'
    if action not in ('end', 'warn'):
        raise ValueError(f'the environment variable {ACTION} must be end or '
                         f'warn, not {action!r}')
    return StallSettings(seconds, action == 'end', _LEAST)


# --- the cause ---------------------------------------------------------------

class State(enum.Enum):
    """What a rank does; the value says it of several ranks, in a message."""

    WAITS = 'waits for other ranks'
    WORKS = 'does not wait for any rank'
    STOPPED = 'is stopped (SIGSTOP, or a debugger)'
    GONE = 'is gone'
    SILENT = 'does not answer'
    LEFT = 'has left the job'


_BROKEN = State.STOPPED, State.GONE, State.LEFT


class RankView(NamedTuple):
    """Says where a rank is and for whom it waits, as another rank knows.

    Attributes:
        rank: Its number.
        who: The rank in words, with process and host.
        state: What it does.
        details: More about that, in words.
        waits_for: Ranks that it waits for, as far as it knows.
        call: Where it waits; equal on ranks that are in the same call.
        updates: How many it has finished; -1: not known.
        moves: Differs from look to look if a rank that waits moves on.
        stack: As in a traceback.
        outside: What it waits for may be no rank of the job.
    """

    rank: int
    who: str
    state: State
    details: str = ''
    waits_for: tuple[int, ...] = ()
    call: str = ''
    updates: int = -1
    moves: str = ''
    stack: str = ''
    outside: bool = False

    def in_words(self) -> str:
        """One line."""
        return f'{self.who} {self.state.value}' + (
            f': {self.details}' if self.details else '')


class Cause(NamedTuple):
    """Why a job stands still.

    Attributes:
        ranks: The cause; () if no rank differs from the others.
        text: Lines about it.
        is_certain: The job cannot go on by itself: no rank works that might
            be done some day.
    """

    ranks: tuple[int, ...]
    text: str
    is_certain: bool


def find_cause(views: Iterable[RankView]) -> Cause:
    """The cause, from what is known of all ranks."""
    known = {view.rank: view for view in views}
    broken = [view for view in known.values() if view.state in _BROKEN]
    busy = [view for view in known.values()
            if view.state in (State.WORKS, State.SILENT)]
    if broken and not (busy and all(view.state is State.LEFT
                                    for view in broken)):
        return _cause(broken, 'gone or stopped', True)
    if busy:
        awaited = _behind(known)
        found = [view for view in busy if view.rank in awaited] or busy
        return _cause(found, 'behind which others wait', False)
    return _deadlock(known)


def _cause(found: Sequence[RankView], why: str, is_certain: bool) -> Cause:
    ranks = tuple(view.rank for view in found)
    return Cause(ranks, f'the cause: {_names(ranks)}, {why}:\n'
                 + _lines(found), is_certain)


def _behind(known: Mapping[int, RankView]) -> set[int]:
    """Ranks that some rank waits for."""
    return {peer for view in known.values() for peer in view.waits_for}


def _deadlock(known: Mapping[int, RankView]) -> Cause:
    """All ranks wait: who waits in another call than those behind it?"""
    awaited = _behind(known)
    ends = [view for view in known.values()
            if view.rank in awaited and not view.waits_for]
    if ends and any(view.waits_for for view in known.values()):
        return _cause(ends, 'for which others wait, in another call', True)
    groups: dict[tuple, list[RankView]] = collections.defaultdict(list)
    for view in known.values():
        groups[view.call, view.updates].append(view)
    largest = max(groups.values(), key=len, default=[])
    others = [view for view in known.values() if view not in largest]
    if not others:
        return Cause((), 'all ranks wait for each other in the same place: a '
                     'message was lost, or a link is down\n'
                     + _lines([*known.values()]), True)
    if len(largest) > len(others):
        cause = _cause(others, 'in another call than the others', True)
        return cause._replace(text=cause.text + 'the others:\n'
                              + _lines(largest))
    return Cause(tuple(known), 'the ranks wait for each other in different '
                 'calls, and no call is that of most:\n'
                 + _lines([*known.values()]), True)


def _lines(views: Sequence[RankView], most: int = 16) -> str:
    lines = [f'  {view.in_words()}\n' for view in views[:most]]
    if views[most:]:
        lines.append(f'  and {len(views) - most} more\n')
    return ''.join(lines)


def _names(ranks: Sequence[int], most: int = 16) -> str:
    names = ', '.join(map(str, ranks[:most])) + ', ...' * (len(ranks) > most)
    return f'{"ranks" if ranks[1:] else "rank"} {names}'


# --- the rule ----------------------------------------------------------------

_MOST_STACKS = 16       # that are printed


class Decision(NamedTuple):
    """What is to be done about a job that stands still.

    Attributes:
        ends: The job ends; else it goes on.
        text: That is printed.
    """

    ends: bool
    text: str


class StallRule:
    """Looks at all ranks again and again.

    Args:
        settings: Of the job.
        longest: Seconds between two looks; more, and the watchdog was
            stopped or late.
    """

    def __init__(self, settings: StallSettings, longest: float) -> None:
        self._settings = settings
        self._longest = longest
        self._last: dict[int, RankView] = {}
        self._looked = self._since = 0.0
        self._updated: dict[int, float] = {}
        self._counts: dict[int, int] = {}       # of updates, at least
        self._told = ''             # of this stall: '', 'warn' or 'end'

    def look(self, now: float, views: Sequence[RankView], usual: float,
             is_complete: bool) -> Decision | None:
        """Looks once.

        Args:
            now: The time.
            views: Of all ranks that are known, in their order.
            usual: Seconds that an update usually takes.
            is_complete: These are all ranks of the job.

        Returns:
            What is to be done now; None: nothing.
        """
        was_late, self._looked = now - self._looked > self._longest, now
        for view in views:
            last = self._last.get(view.rank)
            has_updated = view.updates > self._counts.get(view.rank, -1)
            if last is None or was_late or has_updated:
                self._updated[view.rank] = now
            if last is None or was_late or has_updated or (
                    _changes(last, view)):
                self._since, self._told = now, ''
            self._last[view.rank] = view
            self._counts[view.rank] = max(
                view.updates, self._counts.get(view.rank, 0))
        found = [view for view in self._last.values() if not _serves(view)]
        if not any(view.state is State.WAITS for view in found) or not any(
                self._counts.values()):
            self._since, self._told = now, ''
            return None
        return self._judge(now, found, usual, is_complete)

    def _judge(self, now: float, views: Sequence[RankView], usual: float,
               is_complete: bool) -> Decision | None:
        limit = self._settings.limit(usual)
        if now - self._since < limit:
            return None
        cause = find_cause(views)
        awaited = {rank for view in views for rank in view.waits_for}
        is_certain = cause.is_certain and is_complete and not any(
            view.outside for view in views if view.state is State.WAITS)
        is_broken = any(
            view.rank in cause.ranks and (
                view.state in (State.STOPPED, State.GONE)
                or view.state is State.LEFT and view.rank in awaited)
            for view in views)
        if now - self._since < limit * self._settings.patience(is_certain,
                                                               is_broken):
            return None
        ends = self._settings.ends_if(is_certain)
        if self._told in ('end', 'end' if ends else 'warn'):
            return None
        self._told = 'end' if ends else 'warn'
        still = min(now - self._updated[view.rank] for view in views
                    if self._counts[view.rank])
        text = ''.join(self._line(now, view) for view in views[:_MOST_STACKS])
        text += (f'\nchainer_fp8pipe: the job stands still: no rank has '
                 f'finished an update for {still:.0f} seconds; {cause.text}')
        if not is_complete:
            text += 'nothing is known of the other ranks of the job\n'
        if ends:
            text += f'ending all ranks with exit code {EXIT_CODE}\n'
        return Decision(ends, text)

    def _line(self, now: float, view: RankView) -> str:
        count = self._counts[view.rank]
        before = f' ({"at least " * (view.updates < 0)}{count} before)'
        return (f'\nchainer_fp8pipe: {view.who} has finished no update for '
                f'{now - self._updated[view.rank]:.0f} seconds'
                + before * bool(count) + f'; it {view.state.value}'
                + f', {view.details}' * bool(view.details)
                + f'\n{view.stack}')


def _changes(last: RankView, view: RankView) -> bool:
    return view.state is not last.state or (
        view.state is State.WAITS and view.moves != last.moves)


def _serves(view: RankView) -> bool:
    """Whether a rank makes no updates, but sums for those that do."""
    return view.updates == 0 and view.state is State.WAITS
