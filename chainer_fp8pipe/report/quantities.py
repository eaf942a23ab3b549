"""Quantities as people write and read them."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TIMES = ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'µs'))
_SIZES = ('B', 'kB', 'MB', 'GB', 'TB')
_COUNTS = {'': 1, 'k': 10 ** 3, 'm': 10 ** 6, 'g': 10 ** 9, 't': 10 ** 12}
_BYTES = {'b': 1, **_COUNTS, **{
    f'{name}b': scale for name, scale in _COUNTS.items()}, **{
    f'{name}ib': 2 ** (10 * power) for power, name in enumerate('kmgt', 1)}}
_RATES = {f'{name}{ending}': scale for name, scale in _COUNTS.items()
          for ending in ('bit', 'bit/s', 'bps')}


def number(value: float, digits: int = 4) -> str:
    """So many significant digits; an exponent only below 0.0001 and from a
    billion on."""
    text = f'{value:.{digits}g}'
    return f'{float(text):.0f}' if 'e+' in text and abs(value) < 1e9 else text


def seconds(value: float) -> str:
    """Seconds, with a unit that suits: ``'12.3 ms'``, ``'3 min 20 s'``."""
    if 99.5 <= value < math.inf:
        minutes, rest = divmod(round(value), 60)
        return f'{minutes} min {rest} s' if minutes < 60 else (
            f'{minutes // 60} h {minutes % 60} min')
    # 0.9996 ms are 1 ms with three digits, not 1000 us.
    scale, unit = next((pair for pair in _TIMES
                        if float(f'{abs(value):.3g}') >= pair[0]), _TIMES[-1])
    return f'{number(value / scale, 3)} {unit}' if value else '0 s'


def size(value: float, up: bool = False) -> str:
    """Bytes in up to three digits, as in ``'2.15 GB'`` or ``'400 MB'``.

    ``up``: rounded up, for text that tells the user a sufficient limit.
    """
    if not math.isfinite(value):
        return str(value)
    rounded = math.ceil if up else round
    whole = int(rounded(value))
    step = 10 ** max(0, len(str(whole)) - 3)
    whole = rounded(whole / step) * step
    power = min((len(str(whole)) - 1) // 3, len(_SIZES) - 1)
    return f'{whole / 1000 ** power:g} {_SIZES[power]}'


def share(value: float) -> str:
    """A part of one, in per cent."""
    return f'{number(100 * value, 3)} %'


def counted(count: int, what: str) -> str:
    """``'1 stage'``, ``'2 stages'``, ``'2 micro-batches'``."""
    ending = '' if count == 1 else 'es' if what.endswith('h') else 's'
    return f'{count} {what}{ending}'


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, one for each row, with cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def parse_bytes(text: Any) -> float | None:
    """The bytes in ``'300 MB'``, ``'2G'``, ``'2 GiB'`` or a number, or None.

    All readers raise ValueError for what is none, or not positive.
    """
    return None if text is None else _parsed(
        text, _BYTES, 'size; write it as in 300 MB or 2 GiB')


def parse_rate(text: str) -> float:
    """Bits per second of ``'100mbit'``, ``'1 Gbit/s'`` or ``'10 Gbps'``."""
    return _parsed(text, _RATES, 'rate; write it with a unit, as in 100mbit '
                   'or 1gbit')


def parse_count(text: str) -> int:
    """The number in ``'1000'``, ``'64k'`` or ``'8M'``, 1 at least."""
    return round(_parsed(text, _COUNTS, 'number, such as 1000, 64k or 8M', 1))


def parse_seconds(text: str) -> float:
    """The number in ``'16'``, ``'0.5'`` or ``'16 s'``, above 0."""
    return _parsed(text, {'': 1, 's': 1}, 'number of seconds')


def _parsed(text: Any, units: Mapping[str, float], what: str,
            least: float = 0.0) -> float:
    """The number in a text, times that of its unit in small letters."""
    match = re.fullmatch(
        r'\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)\s*',
        '' if text is True else str(text).lower(), re.ASCII)
    if match and match[2] in units:
        found = float(match[1]) * units[match[2]]
        if 0 < found < math.inf and found >= least:
            return found
    raise ValueError(f'{text!r} is no {what}')
