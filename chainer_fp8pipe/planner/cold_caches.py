"""Empties the caches, as a pass of a model does, before what is timed."""
from __future__ import annotations

import numpy

#: More than a core's share of most caches.
_BYTES = 1 << 26


class CacheFiller:
    """Memory that has no other use."""

    def __init__(self) -> None:
        self._memory = numpy.zeros(_BYTES // 4, numpy.float32)

    def fill(self) -> None:
        """Takes the place in caches; some hundredths of a second."""
        self._memory += 1
