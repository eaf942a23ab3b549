"""Checks of numbers that users give."""
from __future__ import annotations

import math
import numbers
from typing import Any


def check_number(name: str, value: Any, zero: bool = False) -> None:
    """Raises ValueError unless this is a finite positive number, or zero."""
    is_number = (isinstance(value, numbers.Real)
                 and not isinstance(value, bool))
    number = float(value) if is_number else math.nan
    if not (math.isfinite(number) and (number > 0 or zero and number == 0)):
        raise ValueError(f'{name} must be a finite number '
                         f'{"not below" if zero else "above"} 0, not '
                         f'{value!r}')


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless this is a positive integer."""
    if (not isinstance(value, numbers.Integral) or isinstance(value, bool)
            or value < 1):
        raise ValueError(f'{name} must be a positive integer, not {value!r}')
