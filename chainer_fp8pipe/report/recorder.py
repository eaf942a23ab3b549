"""What a rank does when: the measured side of a timeline."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .events import Event


class Recorder:
    """Notes events while it is on; costs next to nothing while it is off.

    Times are seconds of this rank's monotonic clock, less ``origin``.

    Args:
        rank: Whose events these are.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.on = False
        self.origin = 0.0
        self.events: list[Event] = []

    def start(self, origin: float) -> None:
        """Forgets what was noted and starts anew.

        Args:
            origin: What this rank's clock says at time zero.
        """
        self.on, self.origin, self.events = True, origin, []

    @contextlib.contextmanager
    def note(self, name: str, micro_batch: int | None = None,
             chunk: int | None = None) -> Iterator[None]:
        """Notes the time spent inside."""
        if not self.on:
            yield
            return
        start = time.monotonic()
        try:
            yield
        finally:
            self.events.append(Event(
                self.rank, name, start - self.origin,
                time.monotonic() - self.origin, micro_batch, chunk))
