"""Events of one rank that are kept while somebody wants them."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from .events import Event

# Seconds between two events that are one: a thread that polls makes many.
_GAP = 100e-6

#: Makes an event, when somebody looks at it: most events of a long run are
#: forgotten before, and to make one costs more than all else about it.
MakesEvent = Callable[[], Event]


class Recording:
    """Keeps the events that a stream writes; see :meth:`EventStream.keep`.

    Args:
        rank: That events name.
        origin: What this rank's ``time.monotonic`` says at time zero; what
            began before is not kept.

    Attributes:
        origin: As given.
    """

    def __init__(self, rank: int, origin: float) -> None:
        self.rank, self.origin = rank, origin
        self._kept: list[MakesEvent] = []
        self._beside: _Made | None = None

    def keep(self, make: MakesEvent) -> None:
        """Keeps an event, which is made on ``time.monotonic``'s clock."""
        self._kept.append(make)

    def keep_beside(self, event: Event) -> None:
        """Keeps one of a thread beside, which may be more of the last one."""
        if event.start < self.origin:
            return              # what follows must not become a part of it
        last = self._beside
        if last is not None and _goes_on(last.event, event):
            last.event = last.event._replace(
                end=event.end, bytes=last.event.bytes + event.bytes)
            return
        self._beside = _Made(event)
        self._kept.append(self._beside)

    @property
    def events(self) -> list[Event]:
        """Those kept so far, in the order of their ends."""
        return self.made(self._kept)

    def take(self) -> list[MakesEvent]:
        """Returns what was kept, of which :meth:`made` makes events.

        The recording goes on without it.
        """
        # Another thread may keep one more in this list meanwhile.
        kept, self._kept, self._beside = self._kept, [], None
        return kept

    def made(self, kept: Iterable[MakesEvent]) -> list[Event]:
        """Events of what was kept, on the recording's clock."""
        origin = self.origin
        return [event._replace(rank=self.rank, start=event.start - origin,
                               end=event.end - origin)
                for event in (make() for make in kept)
                if event.start >= origin]


class _Made:
    """An event that is there already, and may become longer."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self) -> Event:
        return self.event


def _goes_on(before: Event, event: Event) -> bool:
    return ((before.name, before.lane) == (event.name, event.lane)
            and 0 <= event.start - before.end < _GAP)
