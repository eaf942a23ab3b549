"""Where an update's exchange spends bytes and seconds."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


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
    """

    def __init__(self) -> None:
        self.updates = 0
        self.bytes_sent = 0
        self.seconds = {'encode': 0.0, 'exchange': 0.0, 'decode': 0.0}
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times a ``with`` block as ``name``."""
        self._close()
        self._open.append(name)
        try:
            yield
        finally:
            self._close()
            self._open.pop()

    def _close(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
