"""Arrays as the bytes of one message, and a description that travels apart.

A description is text (JSON): reading one runs nothing that a rank has sent.
"""
from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from ..codecs.staging import (
    array_module,
    download,
    empty_wire,
    upload_now,
)
from . import fp8_wire

_ALIGNMENT = 64     # bytes; a cache line, and more than any dtype asks for


class Spec(NamedTuple):
    """How to read one array.

    Attributes:
        shape: Its shape.
        dtype: Its dtype as ``numpy.dtype.str`` writes it, e.g. ``'<f2'``.
        order: Its axes from the one with the largest steps in memory to the
            one with the smallest; None: as in C.  A layer may be sensitive
            to it: sums over other axes are rounded in another order.
        coded: Whether it crosses as fp8 codes.
        repeated: Axes along which the same number is repeated, as
            ``broadcast_to`` makes them; they cross once, and are repeated
            without a copy, because what is computed of an array gets the
            order of its memory.
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] | None
    coded: bool
    repeated: tuple[int, ...] = ()

    @property
    def sent(self) -> tuple[int, ...]:
        """The shape of what crosses."""
        return tuple(1 if axis in self.repeated else length
                     for axis, length in enumerate(self.shape)
                     ) if self.repeated else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a message."""
        size = math.prod(self.sent)
        if self.coded and size:
            return fp8_wire.EXPONENT + size
        return size * numpy.dtype(self.dtype).itemsize


Specs = tuple[Spec | None, ...]


class MessageLayout:
    """Where the arrays of a message lie: in their order, at 64-byte offsets.

    Args:
        specs: One per array; None where there is none.

    Attributes:
        specs: As given.
        places: Where each array's bytes are.
        size: Bytes of a message.
        bare: Whether a message is the memory of one array and nothing else.
    """

    def __init__(self, specs: Specs) -> None:
        self.specs = specs
        self.places: list[slice] = []
        self.size = 0
        for spec in specs:
            length = spec.nbytes if spec else 0
            start = self.size
            if length:
                start = -(-start // _ALIGNMENT) * _ALIGNMENT
            self.size = start + length
            self.places.append(slice(start, self.size))
        self._signature = [
            spec and (spec.shape, numpy.dtype(spec.dtype),
                      (spec.order, spec.repeated))
            for spec in specs]
        self.bare = (len(specs) == 1 and self.size > 0
                     and specs[0] is not None and not specs[0].coded
                     # MPI takes the memory of these as it is.
                     and numpy.dtype(specs[0].dtype).kind in 'biufc')

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether :func:`describe` would give the same specs; quicker."""
        try:
            return self._signature == [
                None if array is None
                else (array.shape, array.dtype, _strides_of(array))
                for array in arrays]
        except AttributeError:      # describe says what is wrong
            return False


def describe(arrays: Sequence[Any], codec: str | None) -> Specs:
    """Describes the message that these arrays become.

    Args:
        arrays: NumPy or CuPy arrays and None.
        codec: None or ``'fp8'``.

    Raises:
        TypeError: For something that is not an array, and for dtypes whose
            elements are not plain numbers, text or bytes.
    """
    return tuple([None if array is None else _spec(array, codec, number)
                  for number, array in enumerate(arrays)])


def encode_specs(specs: Specs) -> bytes:
    """The bytes that :func:`decode_specs` reads."""
    return json.dumps(specs).encode()


def decode_specs(data: bytes) -> Specs:
    """What :func:`encode_specs` wrote."""
    # JSON has lists where specs have tuples.
    return tuple([spec and Spec._make(
        tuple(value) if isinstance(value, list) else value for value in spec)
        for spec in json.loads(data)])


def pack(layout: MessageLayout, arrays: Sequence[Any]) -> numpy.ndarray:
    """Copies arrays into one message, unless MPI can take their memory.

    Returns:
        Contiguous host array of ``layout.size`` bytes: a single contiguous
        NumPy array itself, unless it shall cross as fp8; else a new one.
    """
    if layout.bare and isinstance(arrays[0], numpy.ndarray):
        spec = layout.specs[0]
        assert spec is not None
        return numpy.ascontiguousarray(_in_order(arrays[0], spec))
    xp = array_module(*(array for array in arrays if array is not None))
    wire = empty_wire(xp, layout.size, numpy.uint8)
    for array, spec, place in zip(arrays, layout.specs, layout.places,
                                  strict=True):
        if spec is None or place.start == place.stop:
            continue
        if spec.coded:
            fp8_wire.encode(_in_order(array, spec).reshape(-1), wire[place])
            continue
        part = wire[place].view(spec.dtype)
        if isinstance(array, numpy.ndarray):
            _unrepeated(part, spec)[...] = _at_first(array, spec.repeated)
        else:
            download(_in_order(array, spec).reshape(-1), part)
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


def shaped(flat: Any, spec: Spec) -> Any:
    """The array whose elements these are, in the order of memory."""
    array = _unrepeated(flat, spec)
    if not spec.repeated:
        return array
    return array_module(array).broadcast_to(array, spec.shape)


def crosses_as(specs: Specs, codec: str | None) -> bool:
    """Whether a sender with this codec made these specs."""
    return all(spec.coded == _is_coded(numpy.dtype(spec.dtype), codec)
               for spec in specs if spec)


def _unrepeated(flat: Any, spec: Spec) -> Any:
    """As :func:`shaped`, with a length of 1 where one number is repeated."""
    if spec.order is None:
        return flat.reshape(spec.sent)
    lengths = [spec.sent[axis] for axis in spec.order]
    back = sorted(range(len(lengths)), key=spec.order.__getitem__)
    return flat.reshape(lengths).transpose(back)


def _in_order(array: Any, spec: Spec) -> Any:
    """The numbers that cross, with axes in the order of memory."""
    array = _at_first(array, spec.repeated)
    return array if spec.order is None else array.transpose(spec.order)


def _at_first(array: Any, axes: Sequence[int]) -> Any:
    """The array at the first place of these axes, which stay."""
    return array[tuple([slice(1) if axis in axes else slice(None)
                        for axis in range(array.ndim)])] if axes else array


def _strides_of(array: Any
                ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """:attr:`Spec.order` and :attr:`Spec.repeated` of an array.

    An array with gaps, or with other overlaps in memory, is sent in C's
    order.
    """
    if array.flags.c_contiguous:
        return None, ()
    repeated = tuple([axis for axis, stride in enumerate(array.strides)
                      if not stride and array.shape[axis] > 1])
    array = _at_first(array, repeated)
    if array.flags.c_contiguous:
        return None, repeated
    order = tuple(sorted(range(array.ndim),
                         key=lambda axis: -array.strides[axis]))
    return (order if array.transpose(order).flags.c_contiguous else None,
            repeated)


def _read(part: numpy.ndarray, spec: Spec, xp: Any) -> Any:
    dtype = numpy.dtype(spec.dtype)
    if not part.size:
        return xp.empty(spec.shape, dtype)
    if spec.coded:
        return shaped(fp8_wire.decode(part, dtype, xp), spec)
    return shaped(upload_now(xp, part.view(dtype)), spec)


def _is_coded(dtype: numpy.dtype, codec: str | None) -> bool:
    return codec == 'fp8' and fp8_wire.takes(dtype)


def _spec(array: Any, codec: str | None, number: int) -> Spec:
    try:
        _, dtype, shape = array.flags, array.dtype, array.shape
    except AttributeError:
        raise TypeError(
            f'array {number} of a message is of type '
            f'{type(array).__name__}; expected NumPy or CuPy arrays and '
            'None') from None
    order, repeated = _strides_of(array)
    return Spec(shape, _name(dtype), order, _is_coded(dtype, codec),
                repeated)


@functools.lru_cache(256)
def _name(dtype: numpy.dtype) -> str:
    if dtype.hasobject or numpy.dtype(dtype.str) != dtype:
        raise TypeError(
            f'arrays of dtype {dtype} cannot be sent to another rank; '
            'convert them to one of plain numbers')
    return dtype.str
