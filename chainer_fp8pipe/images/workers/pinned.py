"""From shared memory to a GPU without a copy on the way."""
from __future__ import annotations

import contextlib
from typing import Any

import numpy

from .segment import Segment


class PinnedMemory:
    """Batches' memory, which a GPU may read by itself once it is pinned.

    The driver keeps pinned pages where they are, so that the GPU fetches
    them at the full speed of the bus; from other memory it copies them to
    pages of its own first.

    Args:
        segment: The memory; it is pinned when something is first sent.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._runtime: Any = None
        self._address = 0

    def send(self, array: numpy.ndarray, device: Any) -> Any:
        """A copy on a GPU; when this returns, ``array`` can be changed.

        Args:
            array: In this memory or, without gain, somewhere else.
            device: Chainer's ``GpuDevice``.

        Returns:
            A CuPy array.
        """
        cupy = device.xp
        with device.device:
            self._pin(cupy.cuda.runtime)
            result = cupy.empty(array.shape, array.dtype)
            result.set(array)
            # From pinned memory the GPU is still reading.
            cupy.cuda.get_current_stream().synchronize()
        return result

    def release(self) -> None:
        """Lets the system move the pages again."""
        if self._runtime is not None:
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._runtime.hostUnregister(self._address)
            self._runtime = None

    def _pin(self, runtime: Any) -> None:
        if self._runtime is None and self._segment.fd >= 0:
            whole = self._segment.array(0, (self._segment.size,), 'u1')
            self._address = whole.ctypes.data
            runtime.hostRegister(self._address, self._segment.size, 0)
            self._runtime = runtime
