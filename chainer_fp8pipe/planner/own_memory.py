"""Memory of this process that no array of the model accounts for."""
from __future__ import annotations

import contextlib
import ctypes
import gc

#: What is taken to be so where the system does not say.
USUAL = 16e6


def resident() -> float | None:
    """Bytes of this process that are in memory; None: the system hides that.

    What was freed is first given back to the system.
    """
    gc.collect()
    # Only glibc has the function.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open('/proc/self/status') as file:
        for line in file:
            if line.startswith('VmRSS:'):
                return int(line.split()[1]) * 1024.0
    return None


def growth(before: float | None) -> float:
    """Bytes that this process has grown by: buffers of BLAS, MPI, Python.

    Args:
        before: What :func:`resident` returned.
    """
    after = resident()
    if before is None or after is None:
        return USUAL
    return max(after - before, 0.0)
