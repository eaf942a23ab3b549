"""Numbers of bytes as people write them: 300 MB, 2 GiB."""
from __future__ import annotations

import decimal
import math
import re
from typing import Any

_UNITS = {'': 1, 'b': 1, 'kb': 10 ** 3, 'mb': 10 ** 6, 'gb': 10 ** 9,
          'tb': 10 ** 12, 'kib': 2 ** 10, 'mib': 2 ** 20, 'gib': 2 ** 30,
          'tib': 2 ** 40}
_SAID = ('B', 'kB', 'MB', 'GB', 'TB')


def parse_bytes(size: Any) -> float | None:
    """The number of bytes in ``'300 MB'``, ``'2 GiB'`` or a number.

    Args:
        size: Text, a number, or None for no limit.

    Raises:
        ValueError: ``size`` is none of these, or not positive.
    """
    if size is None:
        return None
    if (isinstance(size, (int, float)) and 0 < size < math.inf
            and size is not True):
        return float(size)
    match = re.fullmatch(r'\s*([0-9.]+)\s*([a-zA-Z]*)\s*', str(size))
    if match and match[2].lower() in _UNITS:
        try:
            found = float(match[1]) * _UNITS[match[2].lower()]
        except ValueError:
            found = 0.0
        if 0 < found < math.inf:
            return found
    raise ValueError(f'{size!r} is no size; write it as in 300 MB or 2 GiB')


def counted(number: int, what: str) -> str:
    """``'1 stage'``, ``'2 stages'``, ``'2 micro-batches'``."""
    ending = '' if number == 1 else 'es' if what.endswith('h') else 's'
    return f'{number} {what}{ending}'


def said_bytes(size: float, up: bool = False) -> str:
    """A size in up to three digits, as in ``'2.15 GB'`` or ``'400 MB'``.

    Args:
        size: Bytes.
        up: Round up, for text that tells the user a sufficient limit.
    """
    rounding = decimal.ROUND_CEILING if up else decimal.ROUND_HALF_EVEN
    whole = math.ceil(size) if up else round(size)
    three = decimal.Context(prec=3, rounding=rounding).create_decimal(
        int(whole))
    power = min(three.adjusted() // 3, len(_SAID) - 1)
    return f'{three.scaleb(-3 * power).normalize():f} {_SAID[power]}'
