"""Images that a rank left out: counted, logged once, saved in snapshots."""
from __future__ import annotations

import logging
from typing import Any

import numpy

_log = logging.getLogger(__name__)


class Skipped:
    """Images, of ``samples`` on all ranks, that a rank could not use."""

    def __init__(self, rank: int, samples: int) -> None:
        self.images = 0             # how often one was left out
        self.substituted = 0        # batches that are an image of another
        self._rank = rank
        self._named = numpy.zeros(samples, bool)    # in the log already

    def add(self, sample: int, path: str, reason: str) -> None:
        """Counts an image, and names it in the log if it is new."""
        self.images += 1
        if not self._named[sample]:
            self._named[sample] = True
            _log.warning('rank %d: skipped %s: %s', self._rank, path, reason)

    def serialize(self, serializer: Any) -> None:
        """Saves or loads counts and logged images.

        One rank's snapshot may be loaded on all ranks: only the rank of the
        same number takes over its counts.
        """
        rank = serializer('rank', self._rank)
        images = serializer('skipped', self.images)
        substituted = serializer('substituted', self.substituted)
        if rank == self._rank:
            self.images, self.substituted = images, substituted
        # Bits, as a snapshot's arrays should have the same shape each time.
        named = serializer('named', numpy.packbits(self._named))
        self._named |= numpy.unpackbits(
            named, count=len(self._named)).astype(bool)
