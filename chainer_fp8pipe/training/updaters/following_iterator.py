"""The iterator of a rank that reads no data."""
from __future__ import annotations

from typing import Any

import chainer

_FIELDS = ('epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail')


class FollowingIterator(chainer.dataset.Iterator):
    """Knows how far the first stage's iterator is, and nothing more.

    The attributes are those of Chainer's ``SerialIterator``.
    """

    def __init__(self) -> None:
        self.follow((0.0, 0.0, 0.0, -1.0))

    def __next__(self) -> Any:
        raise RuntimeError('only the ranks of the first stage read data')

    def follow(self, numbers: tuple[float, ...]) -> None:
        """Takes over what :func:`progress` gave on the first stage."""
        epoch, new, self.epoch_detail, previous = numbers
        self.epoch, self.is_new_epoch = int(epoch), bool(new)
        self.previous_epoch_detail = None if previous < 0 else previous


def progress(iterator: Any) -> tuple[float, ...]:
    """How far an iterator is, as four numbers; -1 is for None."""
    values = [getattr(iterator, field, None) for field in _FIELDS]
    return tuple(-1.0 if value is None else float(value) for value in values)
