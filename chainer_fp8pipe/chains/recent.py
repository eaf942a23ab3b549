"""Values by key, of which the latest are kept."""
from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Generic, TypeVar

_Value = TypeVar('_Value')


class Recent(Generic[_Value]):
    """Forgets what was not asked for the longest.

    Args:
        most: How many values are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: collections.OrderedDict[Hashable, _Value] = (
            collections.OrderedDict())

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, key: Hashable, value: _Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def get(self, key: Hashable) -> _Value | None:
        """The value, which is kept for longer now; None: there is none."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)
