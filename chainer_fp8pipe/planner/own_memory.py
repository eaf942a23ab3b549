"""Memory of this process, which is more than that of the model's arrays."""
from __future__ import annotations

import contextlib
import ctypes
import gc

from ..report.process_memory import bytes_in

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
    return bytes_in('VmRSS')


def growth(before: float | None) -> float:
    """Bytes that this process has grown by: buffers of BLAS, MPI, Python.

    Args:
        before: What :func:`resident` returned.
    """
    after = resident()
    if before is None or after is None:
        return USUAL
    return max(after - before, 0.0)


class Peak:
    """A block of which the system says how much memory was needed.

    Attributes:
        nbytes: The most bytes in memory during the block, beyond those
            before; None: the system does not say.
    """

    nbytes: float | None = None

    def __enter__(self) -> Peak:
        self._before = resident()
        if not forget_peak():
            self._before = None
        return self

    def __exit__(self, *error: object) -> None:
        most = bytes_in('VmHWM')
        if self._before is not None and most is not None:
            self.nbytes = max(most - self._before, 0.0)


def forget_peak() -> bool:
    """Makes what is in memory now the peak; whether the system allows that."""
    with contextlib.suppress(OSError), open(
            '/proc/self/clear_refs', 'w') as file:
        file.write('5')
        return True
    return False
