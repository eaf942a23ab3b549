"""What a codec's state was before buckets that may become void."""
# A bucket that is sent during backward has taken its residuals along.  If it
# becomes void, the gradients are sent again, and their residuals must be with
# them: so what an early bucket may change is copied before it is sent.  That
# is 4 bytes per parameter, and for the part whose means this rank encodes.
from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..codecs import State


class Rollback:
    """Remembers a state from ``begin`` on, bucket by bucket."""

    def __init__(self) -> None:
        self._state: State | None = None
        # By site and tensor: where its part begins, and a copy.
        self._kept: dict[tuple[str, str], tuple[int, Any]] = {}
        self._names: set[str] = set()
        self._numbers: dict[str, dict[str, float]] = {}
        self._spare: dict[tuple[str, str], Any] = {}

    def begin(self, state: State) -> None:
        """An update of the state has begun, by ``codec.begin``."""
        self._state, self._kept, self._names = state, {}, set()
        self._numbers = {kind: dict(values)
                         for kind, values in state.numbers.items()}

    def keep(self, names: Collection[str]) -> None:
        """The tensors of a bucket are about to be sent."""
        assert self._state is not None
        self._names.update(names)
        wanted = set(names)
        for key, (start, array) in self._state._residuals.items():
            if key[1] in wanted:
                spare: Any = self._spare.get(key, 0)
                if (type(spare) is type(array)
                        and spare.shape == array.shape):
                    spare[...] = array
                else:       # one buffer for all updates
                    spare = self._spare[key] = array.copy()
                self._kept[key] = start, spare

    def undo(self) -> None:
        """Nothing of the update has happened; its buckets are finished."""
        state, self._state = self._state, None
        if state is None:
            return
        state.take_largest()        # of means that nobody uses
        state.updates -= 1
        state.numbers, state.nonfinite = self._numbers, []
        for key in [*state._residuals]:
            if key in self._kept:
                start, array = self._kept[key]
                state._residuals[key] = start, array.copy()
            elif key[1] in self._names:     # did not exist yet
                del state._residuals[key]
