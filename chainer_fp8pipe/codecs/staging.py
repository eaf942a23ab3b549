"""Wire bytes between the host, where MPI reads them, and the device."""
from __future__ import annotations

from typing import Any

import numpy


def empty_wire(xp: Any, size: int, dtype: Any) -> numpy.ndarray:
    """A host array that MPI can send: pinned where the gradients are CuPy's.

    Pinned memory lets the device copy without a detour through a buffer of
    the driver's.
    """
    if xp is numpy:
        return numpy.empty(size, dtype)
    import cupyx
    return cupyx.empty_pinned(size, dtype)


def upload_now(xp: Any, wire: numpy.ndarray) -> Any:
    """``wire`` where ``xp`` can compute on it; itself if ``xp`` is NumPy.

    ``wire`` may be given up when it returns: the device reads pinned memory
    where it lies, so the copy is waited for.
    """
    if xp is numpy:
        return wire
    array = xp.empty(wire.shape, wire.dtype)
    array.set(wire)
    xp.cuda.get_current_stream().synchronize()
    return array


def to_host(array: Any) -> numpy.ndarray:
    """A small array or number of either kind, as a new NumPy array."""
    get = getattr(array, 'get', None)       # CuPy's
    return get() if get else numpy.array(array)


def download(written: Any, wire: numpy.ndarray) -> None:
    """Brings a wire that was written on the device to the host, if it was."""
    if written is not wire:
        written.get(out=wire)


def array_module(array: Any) -> Any:
    """``numpy`` or ``cupy``, whose array it is."""
    if isinstance(array, numpy.ndarray):
        return numpy
    import cupy
    return cupy
