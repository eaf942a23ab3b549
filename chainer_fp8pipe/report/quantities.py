"""Numbers as people read them, and what the system says of memory."""
from __future__ import annotations

import contextlib
import math

_TIMES = ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'µs'))
_SIZES = ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB'))


def number(value: float, digits: int = 4) -> str:
    """So many significant digits; an exponent only below 0.0001 and from a
    billion on."""
    if not math.isfinite(value):
        return str(value)
    text = f'{value:.{digits}g}'
    return f'{float(text):.0f}' if 'e+' in text and abs(value) < 1e9 else text


def seconds(value: float) -> str:
    """Seconds, with a unit that suits; from two minutes on as h:mm:ss."""
    if not math.isfinite(value):
        return str(value)
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{rest:02} h'
    # 0.9996 ms are 1 ms with three digits, not 1000 us.
    scale, unit = next((pair for pair in _TIMES
                        if float(f'{abs(value):.3g}') >= pair[0]), _TIMES[-1])
    return f'{number(value / scale, 3)} {unit}' if value else '0 s'


def size(value: float) -> str:
    """Bytes, with a unit that suits (powers of 1,000)."""
    if not math.isfinite(value):
        return str(value)
    for scale, unit in _SIZES:
        if abs(value) >= scale:
            return f'{number(value / scale, 3)} {unit}'
    return f'{value:.0f} bytes'


def share(value: float) -> str:
    """A part of one, in per cent."""
    return f'{number(100 * value, 3)} %'


def bytes_in(field: str) -> float | None:
    """Bytes of this process; None: the system does not say.

    Args:
        field: ``'VmRSS'`` for the bytes in memory now, ``'VmHWM'`` for the
            most that there have been.
    """
    with contextlib.suppress(OSError), open('/proc/self/status') as file:
        for line in file:
            if line.startswith(field + ':'):
                return int(line.split()[1]) * 1024.0
    return None
