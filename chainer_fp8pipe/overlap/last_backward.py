"""Which backward pass is the last before a model's gradients are averaged."""
from __future__ import annotations

import collections
from collections.abc import Hashable


class LastBackward:
    """Learns it from one mean to the next.

    Between two means of a model's gradients there may be several passes:
    they may add up their gradients, or the loss of a generator may go
    through a discriminator, whose own pass is still to come.  Only in the
    last one do gradients become final.
    """

    def __init__(self) -> None:
        self._counts: collections.Counter[Hashable] = collections.Counter()
        self._last: Hashable = None
        self._usual: Hashable = None
        self._often = 0
        self._models: int | None = None
        self._complete = False

    def begin(self, kind: Hashable, models: int) -> bool:
        """Takes notice of a pass; whether it should be the last.

        Args:
            kind: Passes of the same kind cannot be told apart.
            models: Changes when kinds get another meaning.
        """
        if models != self._models:
            if self._models is not None:
                self._usual = None
                self._complete = False
            self._models = models
        self._counts[kind] += 1
        self._last = kind
        return kind == self._usual and self._counts[kind] >= self._often

    def averaged(self) -> None:
        """The gradients have been averaged."""
        if self._complete and self._last is not None:
            often = self._counts[self._last]
            if self._last == self._usual:
                # Sometimes there are fewer: that must not be taken for all.
                often = max(often, self._often)
            self._usual, self._often = self._last, often
        self._counts.clear()
        self._last = None
        self._complete = True
