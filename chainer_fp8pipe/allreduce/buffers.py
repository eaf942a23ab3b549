"""Memory for messages that is used again."""
from __future__ import annotations

from collections.abc import Iterable

import numpy


class Buffers:
    """Lends memory; large blocks are slow to get from the system."""

    def __init__(self) -> None:
        self._free: list[numpy.ndarray] = []
        self._bytes = 0

    def take(self, size: int) -> numpy.ndarray:
        """At least ``size`` bytes."""
        if size > self._bytes:      # what is lent still is not taken back
            self._bytes = 1 << (size - 1).bit_length()
            self._free = []
        return (self._free.pop() if self._free
                else numpy.empty(self._bytes, numpy.uint8))

    def give(self, lent: Iterable[numpy.ndarray]) -> None:
        """Takes back what :meth:`take` gave."""
        self._free += [memory for memory in lent
                       if memory.size == self._bytes]
