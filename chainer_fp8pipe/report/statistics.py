"""Where an update's exchange spends bytes and seconds."""
from __future__ import annotations

import threading
import time


class Statistics:
    """Counters of one rank's exchanges.

    Attributes:
        updates: Exchanges finished.
        bytes_sent: Bytes of wires and scales that this rank handed to MPI,
            over all updates; without the 16 bytes of the agreement and what
            ``bcast_data`` sends.  For ``MPI_Allreduce``, which sends out of
            sight, what a reduce-scatter and an all-gather need.
        seconds: Seconds by section, over all updates: ``'encode'``,
            ``'exchange'`` (MPI, incl. waiting for slower ranks) and
            ``'decode'`` (incl. sums).  Sections exclude each other: time in
            an inner one does not count for the outer.
        hidden: The same of what was done beside the backward pass, in the
            thread that called :meth:`hide`.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.bytes_sent = 0
        self.seconds = {'encode': 0.0, 'exchange': 0.0, 'decode': 0.0}
        self.hidden = dict(self.seconds)
        self._thread = _Thread()

    @property
    def waited(self) -> float:
        """Seconds that updates had to wait for their exchange, in all."""
        return sum(self.seconds.values())

    def hide(self) -> None:
        """From now on, this thread's sections count as hidden."""
        self._thread.hidden = True

    def section(self, name: str) -> Section:
        """Times a ``with`` block as ``name``."""
        return Section(self, name)

    def excluded(self) -> Section:
        """A ``with`` block that counts for no section."""
        return Section(self, '')

    def begin(self, name: str) -> None:
        """A section begins; see :class:`Section`."""
        self._count()
        self._thread.open.append(name)

    def end(self) -> None:
        """The innermost section ends."""
        self._count()
        self._thread.open.pop()

    def divide(self, **seconds: float) -> None:
        """Gives sections so many seconds of the one that is open.

        Args:
            seconds: By section.
        """
        thread = self._thread
        counted = self.hidden if thread.hidden else self.seconds
        for name, amount in seconds.items():
            counted[name] += amount
            if thread.open:
                counted[thread.open[-1]] -= amount

    def _count(self) -> None:
        thread = self._thread
        now = time.perf_counter()
        if thread.open and thread.open[-1]:
            seconds = self.hidden if thread.hidden else self.seconds
            seconds[thread.open[-1]] += now - thread.since
        thread.since = now


class Section:
    """A ``with`` block that is timed; updates open many.

    Args:
        statistics: Counters to add to.
        name: Of the section; '' for none.
    """

    def __init__(self, statistics: Statistics, name: str) -> None:
        self._statistics = statistics
        self._name = name

    def __enter__(self) -> None:
        self._statistics.begin(self._name)

    def __exit__(self, *exception: object) -> None:
        self._statistics.end()


class _Thread(threading.local):
    """The sections that a thread is in."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.since = 0.0
        self.hidden = False
