"""When a job stands still, and what happens then: pure data and a clock.

A job stands still for as long as some rank waits for others and nothing
changes: no rank finishes an update, or begins or ceases to wait, and none
that waits moves on, in what it waits for or in its main thread.  A rank that
does something else than wait for ranks (it computes, reads, sleeps, waits for
a process, for a debugger, or for an MPI process outside of the job) may go on
by itself, so a job with such a rank is only warned, unless the user has given
seconds.  A rank that has ended waits for nobody.  Nothing counts before the
first update, and no time in which the watchdog itself did not run.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .stall_cause import RankView, State, find_cause
from .stall_settings import EXIT_CODE, StallSettings

_MOST_STACKS = 16       # that are printed
_BROKEN = State.STOPPED, State.GONE


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
            view.rank in cause.ranks and (view.state in _BROKEN or (
                view.state is State.LEFT and view.rank in awaited))
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
