"""Events of one rank that are kept while somebody wants them."""
from __future__ import annotations

from .events import Event

# Seconds between two events that are one: a thread that polls makes many.
_GAP = 100e-6


class Recording:
    """Keeps the events that a stream writes; see :meth:`EventStream.keep`.

    Args:
        rank: That events name.
        origin: What this rank's ``time.monotonic`` says at time zero; what
            began before is not kept.

    Attributes:
        origin: As given.
        events: In the order of their ends.
    """

    def __init__(self, rank: int, origin: float) -> None:
        self.rank, self.origin = rank, origin
        self.events: list[Event] = []
        self._last = 0          # place of the last event beside

    def keep(self, event: Event) -> None:
        """Keeps an event on the clock of ``time.monotonic``."""
        origin = self.origin
        if event.start < origin:
            return
        if origin or self.rank:     # which costs as much as the rest
            event = event._replace(rank=self.rank, start=event.start - origin,
                                   end=event.end - origin)
        # Another thread may take the events meanwhile.
        events = self.events
        if event.lane and event.name != 'bucket':
            if self._last < len(events):
                before = events[self._last]
                if ((before.name, before.lane) == (event.name, event.lane)
                        and 0 <= event.start - before.end < _GAP):
                    events[self._last] = before._replace(
                        end=event.end, bytes=before.bytes + event.bytes)
                    return
            self._last = len(events)
        events.append(event)

    def take(self) -> list[Event]:
        """The events kept so far, which are forgotten here."""
        events, self.events = self.events, []
        return events
