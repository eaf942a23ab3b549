"""From shared memory to a GPU without a copy on the way."""
from __future__ import annotations

import contextlib
from typing import Any

import numpy

from .segment import Segment


class PinnedMemory:
    """Memory of batches that is pinned when the first one is sent.

    A GPU fetches pinned pages at the full speed of the bus; others, the
    driver first copies to pages of its own.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._runtime: Any = None
        self._address = 0

    def send(self, array: numpy.ndarray, device: Any) -> Any:
        """A CuPy copy on Chainer's ``device`` of an array in this memory.

        The array, which may without gain be elsewhere, may change afterwards.
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
        """Unpins the pages."""
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
