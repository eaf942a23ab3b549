"""What the system says of this process's memory."""
from __future__ import annotations

import contextlib


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
