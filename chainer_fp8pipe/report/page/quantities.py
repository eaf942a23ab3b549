"""Numbers as people read them: three digits and a unit."""
from __future__ import annotations

import math

_TIMES = ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'µs'))
_SIZES = ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB'))


def number(value: float) -> str:
    """Four significant digits."""
    return f'{value:.4g}' if math.isfinite(value) else str(value)


def seconds(value: float) -> str:
    """Seconds, with a unit that suits; from two minutes on as h:mm:ss."""
    if not math.isfinite(value):
        return str(value)
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{rest:02} h'
    scale, unit = next((pair for pair in _TIMES if abs(value) >= pair[0]),
                       _TIMES[-1])
    return f'{value / scale:.3g} {unit}' if value else '0 s'


def size(value: float) -> str:
    """Bytes, with a unit that suits (powers of 1,000)."""
    if not math.isfinite(value):
        return str(value)
    for scale, unit in _SIZES:
        if abs(value) >= scale:
            return f'{value / scale:.3g} {unit}'
    return f'{value:.0f} bytes'


def share(value: float) -> str:
    """A part of one, in per cent."""
    return f'{100 * value:.3g} %'
