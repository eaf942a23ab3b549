"""The first updates in float32 (section 4.2 of the fp8 paper)."""
from __future__ import annotations

import numpy

from .cast import Cast
from .codec import Codec


class WarmUp:
    """``float32`` for the first updates, then another codec.

    Early gradients change by orders of magnitude from one update to the
    next; the paper lets the first 100 updates travel in float32 in all its
    comparisons.

    Args:
        codec: The codec after the warm-up.
        updates: Length of the warm-up; 0 for none.

    Attributes:
        done: Updates finished so far.
    """

    def __init__(self, codec: Codec, updates: int) -> None:
        self.codec = codec
        self.updates = updates
        self.done = 0
        self._first = Cast('float32')

    @property
    def current(self) -> Codec:
        """The codec of the update to come."""
        return self._first if self.done < self.updates else self.codec

    def state(self) -> dict[str, numpy.ndarray]:
        """All that must be saved for an exact continuation."""
        return {'done': numpy.asarray(self.done), **self.codec.state()}

    def load_state(self, state: dict[str, numpy.ndarray]) -> None:
        """Takes over what :meth:`state` gave."""
        rest = dict(state)
        done = int(rest.pop('done'))
        self.codec.load_state(rest)
        self.done = done
