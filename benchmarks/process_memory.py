"""What the kernel says of this process's memory."""
from __future__ import annotations

import contextlib


def bytes_in(field: str) -> int:
    """Bytes in a field of the process's status.

    Args:
        field: ``'VmRSS'`` for what is in memory now, ``'VmHWM'`` for the
            peak of that.

    Raises:
        RuntimeError: The system does not say.
    """
    with open('/proc/self/status') as file:
        for line in file:
            if line.startswith(field + ':'):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f'the system does not say {field}')


def forget_peak() -> bool:
    """Begins the peak anew; whether the system allows that."""
    with contextlib.suppress(OSError), open(
            '/proc/self/clear_refs', 'w') as file:
        file.write('5')
        return True
    return False
