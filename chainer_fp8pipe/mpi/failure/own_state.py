"""What this rank does, for itself and for others that ask."""
from __future__ import annotations

import time
from typing import Any, NamedTuple

from .main_thread import position, signature
from .stall_cause import State
from .update_count import UpdateCount
from .waits import current_waits

_LONGEST = 300          # characters of a text for others


class Report(NamedTuple):
    """What a rank says of itself.

    Attributes:
        updates: That it has finished.
        idle: Seconds since the last of them; None: there was none.
        still: Seconds since anything has moved in its main thread.
        state: Name of a :class:`.State`.
        details: In words.
        waits_for: Ranks.
        call: Where it waits.
    """

    updates: int
    idle: float | None
    still: float
    state: str
    details: str
    waits_for: tuple[int, ...]
    call: str


def report_from(message: dict[str, Any]) -> Report:
    """The report in a message.

    Raises:
        KeyError: There is none.
    """
    found = Report(*(message[field] for field in Report._fields))
    return found._replace(waits_for=tuple(found.waits_for))


class OwnState:
    """Watches this rank's main thread, from another one.

    Only time counts in which this process has run: one that was stopped has
    not stood still.

    Args:
        updates: Of this rank.
        longest: Seconds between two looks; more, and the process was stopped.
    """

    def __init__(self, updates: UpdateCount, longest: float) -> None:
        self._updates = updates
        self._longest = longest
        self._last = time.monotonic()
        self._total = -1
        self._signature: object = None
        self._idle = self._still = 0.0

    @property
    def idle(self) -> float:
        """Seconds since the last update; 0 before the first."""
        return self._idle if self._total > 0 else 0.0

    def look(self) -> bool:
        """Looks whether something has moved; whether that was no surprise.

        False if so much time has passed that this process was stopped: what
        is known of others is out of date, too.
        """
        now = time.monotonic()
        passed, self._last = now - self._last, now
        was_stopped = passed > self._longest
        if was_stopped:
            self._idle = self._still = passed = 0.0
        if self._updates.total != self._total:
            self._total = self._updates.total
            self._idle = self._still = 0.0
            self._signature = None
            return not was_stopped
        self._idle += passed
        found = signature(), current_waits()
        if found != self._signature:
            self._signature, self._still = found, 0.0
        else:
            self._still += passed
        return not was_stopped

    def report(self) -> Report:
        """What this rank does now."""
        where, waits = position(), current_waits()
        place, call = (where.place, where.call) if where else ('', '')
        found = State.WAITS if waits or call else State.WORKS
        text = ''
        if waits:
            text = f'for {waits[0].text}; '
        elif call:
            text = f'in {call}; '
        return Report(
            self._total, self._idle if self._total > 0 else None, self._still,
            found.name, f'{text}at {place}'[:_LONGEST],
            waits[0].ranks if waits else (),
            f'{call} {place}' if found is State.WAITS else '')
