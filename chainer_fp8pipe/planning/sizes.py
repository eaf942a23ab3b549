"""Bytes for people."""
from __future__ import annotations


def said_bytes(size: float) -> str:
    """A size in three digits, as in ``'2.1 MB'``."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if size < 999.5 or unit == 'GB':
            break
        size /= 1000
    digits = 0 if unit == 'B' or size >= 99.5 else 1
    return f'{size:.{digits}f} {unit}'
