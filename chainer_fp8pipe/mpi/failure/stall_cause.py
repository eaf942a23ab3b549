"""Which ranks a job that stands still waits for: pure data.

Every rank that waits for others has a reason not to go on.  The cause are
those that have none: ranks that are stopped or gone, ranks that do something
else, and, where all wait, ranks that wait in another call than most.
"""
from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


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
