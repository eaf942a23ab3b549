"""Keeps a long row of readings short."""
from __future__ import annotations


class Thinning:
    """Says which of many readings are to be kept: all at first, then fewer.

    Of the first ``limit`` readings all are kept, then every second one until
    as many have been kept again, then every fourth, and so on.

    Args:
        limit: As above.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._seen, self._kept = limit, 0, 0

    def keep(self) -> bool:
        """Counts a reading; whether it is to be kept."""
        stride = 1 << (self._kept // self._limit)
        self._seen += 1
        keep = self._seen % stride == 0
        self._kept += keep
        return keep
