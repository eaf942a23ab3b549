"""Arrays to the bytes of one message, and back."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from ..codecs.staging import download, empty_wire, upload_now
from ..codecs.tensors import array_module
from . import fp8_wire
from .wire import MessageLayout, Spec


def pack(layout: MessageLayout, arrays: Sequence[Any]) -> numpy.ndarray:
    """What MPI shall send.

    Args:
        layout: Made from the description of these arrays.
        arrays: NumPy or CuPy arrays and None.

    Returns:
        Contiguous host array of ``layout.size`` bytes: a single contiguous
        NumPy array itself, unless it shall cross as fp8; else a new one.
    """
    if layout.bare and isinstance(arrays[0], numpy.ndarray):
        return numpy.ascontiguousarray(_ordered(arrays[0],
                                                layout.specs[0]))
    xp = array_module(*(array for array in arrays if array is not None))
    wire = empty_wire(xp, layout.size, numpy.uint8)
    for array, spec, place in zip(arrays, layout.specs, layout.places,
                                  strict=True):
        if spec is None or place.start == place.stop:
            continue
        if spec.coded:
            fp8_wire.encode(_flat(array, spec), wire[place])
        else:
            part = wire[place].view(spec.dtype)
            if isinstance(array, numpy.ndarray):
                shaped(part, spec)[...] = array
            else:
                download(_flat(array, spec), part)
    return wire


def unpack(layout: MessageLayout, wire: numpy.ndarray,
           xp: Any) -> tuple[Any, ...]:
    """The arrays of a message.

    Args:
        layout: Made from the message's description.
        wire: uint8 host array of at least ``layout.size``.
        xp: ``numpy`` or ``cupy``: of which kind the arrays shall be.

    Returns:
        Arrays of ``xp``, and None.  NumPy arrays that did not cross as fp8
        lie in the memory of ``wire``.
    """
    return tuple([None if spec is None else _read(wire[place], spec, xp)
                  for spec, place in zip(layout.specs, layout.places,
                                         strict=True)])


def _read(part: numpy.ndarray, spec: Spec, xp: Any) -> Any:
    dtype = numpy.dtype(spec.dtype)
    if not part.size:
        return xp.empty(spec.shape, dtype)
    if spec.coded:
        return shaped(fp8_wire.decode(part, dtype, xp), spec)
    return shaped(upload_now(xp, part.view(dtype)), spec)


def _flat(array: Any, spec: Spec) -> Any:
    """The elements in the order they lie in memory; a copy if need be."""
    return _ordered(array, spec).reshape(-1)


def _ordered(array: Any, spec: Spec | None) -> Any:
    """The array with its axes in the order in which they lie in memory."""
    if spec is None or spec.order is None:
        return array
    return array.transpose(spec.order)


def shaped(flat: Any, spec: Spec) -> Any:
    """The array whose elements these are, in the order of memory."""
    if spec.order is None:
        return flat.reshape(spec.shape)
    lengths = [spec.shape[axis] for axis in spec.order]
    back = sorted(range(len(lengths)), key=spec.order.__getitem__)
    return flat.reshape(lengths).transpose(back)
