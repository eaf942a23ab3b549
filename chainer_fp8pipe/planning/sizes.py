"""Bytes as people write them."""
from __future__ import annotations

import re
from typing import Any

_UNITS = {'': 1, 'b': 1, 'kb': 10 ** 3, 'mb': 10 ** 6, 'gb': 10 ** 9,
          'tb': 10 ** 12, 'kib': 2 ** 10, 'mib': 2 ** 20, 'gib': 2 ** 30,
          'tib': 2 ** 40}


def parse_bytes(size: Any) -> float | None:
    """The number of bytes in ``'300 MB'``, ``'2 GiB'`` or a number.

    Args:
        size: Text, a number, or None for no limit.

    Raises:
        ValueError: It is none of these, or not positive.
    """
    if size is None:
        return None
    if isinstance(size, (int, float)) and size > 0 and size is not True:
        return float(size)
    match = re.fullmatch(r'\s*([0-9.]+)\s*([a-zA-Z]*)\s*', str(size))
    if match and match[2].lower() in _UNITS:
        try:
            found = float(match[1]) * _UNITS[match[2].lower()]
        except ValueError:
            found = 0.0
        if found > 0:
            return found
    raise ValueError(f'{size!r} is no size; write it as in 300 MB or 2 GiB')


def said_bytes(size: float) -> str:
    """A size in three digits, as in ``'2.1 MB'``."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if size < 999.5 or unit == 'GB':
            break
        size /= 1000
    digits = 0 if unit == 'B' or size >= 99.5 else 1
    return f'{size:.{digits}f} {unit}'
