"""Intervals of training as people write them: 5m, 30 s, 100 iterations."""
from __future__ import annotations

import re
from typing import NamedTuple

_SECONDS = {'s': 1.0, 'm': 60.0, 'h': 3600.0}


class Interval(NamedTuple):
    """How often something happens in a training."""

    amount: float
    unit: str       # 'second', 'iteration' or 'epoch'


def parse_interval(text: str) -> Interval:
    """The interval in ``'5m'``, ``'100 iterations'`` or ``'1 epoch'``.

    Times are in ``s``, ``m`` and ``h``.

    Raises:
        ValueError: The text is none of these, or not positive, or has a
            part of an iteration.
    """
    match = re.fullmatch(
        r'\s*(\d+(?:\.\d+)?)\s*(s|m|h|iterations?|updates?|epochs?)\s*', text)
    if match and float(match[1]) > 0:
        amount, unit = float(match[1]), match[2]
        if unit in _SECONDS:
            return Interval(amount * _SECONDS[unit], 'second')
        if unit.startswith('epoch'):
            return Interval(amount, 'epoch')
        if amount.is_integer():
            return Interval(amount, 'iteration')
    raise ValueError(f'{text!r} is no interval; write it as in 30s, 5m, 1h, '
                     "'100 iterations' or '1 epoch'")
