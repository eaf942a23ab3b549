"""The gradients and parameters of one update, laid end to end.

For Python that is :class:`Tensors`; for compiled code, tables of addresses
with a row for each tensor (:class:`Compiled`; ``allreduce/native/job.h`` has
the same columns).
"""
from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from . import _places
from .staging import download, empty_wire

#: Numbers of codecs.
IN_PYTHON, FLOAT32, FP8, RELAY, FLOAT16, RECORDS = range(6)

_PARAMETER, _OUT = 3, 4         # columns of `tensors`
_BLAMED, _NONFINITE = 2, 3      # of `findings`


class TensorRange(NamedTuple):
    """The part of one tensor that lies inside a range of the fused vector."""

    tensor: int         # which one
    in_tensor: slice    # the part, counted from the tensor's first element
    in_range: slice     # its entries, counted from the range's start


class Tensors:
    """Parameter tensors and their gradients, fused into one vector.

    Nothing is copied: the fused vector is only a way of numbering elements
    (tensor fusion), so that small tensors need no message of their own.  Its
    entries are those of a wire: of ``grain`` elements each, of which a
    tensor's last one may have fewer.

    Args:
        names: One name per tensor, unique, in the same order on all ranks.
        gradients: Flat float32 arrays, all NumPy or all CuPy.
        parameters: Flat float32 arrays of the same sizes.
        loss_scale: Factor that the gradients carry (mixed precision).
        grain: Elements of an entry, see :attr:`.Codec.grain`.

    Attributes:
        size: Number of entries of the fused vector.
        offsets: Index of each tensor's first entry, and ``size``.
        xp: ``numpy`` or ``cupy``.
    """

    def __init__(self, names: Sequence[str], gradients: Sequence[Any],
                 parameters: Sequence[Any], loss_scale: float = 1.0,
                 grain: int = 1) -> None:
        self.names = tuple(names)
        self.gradients = list(gradients)
        self.parameters = list(parameters)
        self.loss_scale = loss_scale
        self.grain = grain
        self.offsets = [0]
        for gradient in self.gradients:
            self.offsets.append(self.offsets[-1] - (-gradient.size // grain))
        self.size = self.offsets[-1]
        self.xp = array_module(*self.gradients)

    def overlaps(self, start: int, stop: int) -> Iterator[TensorRange]:
        """The non-empty parts of tensors inside ``[start, stop)``, entries."""
        first = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        for index in range(first, len(self.names)):
            low = max(self.offsets[index], start)
            high = min(self.offsets[index + 1], stop)
            if self.offsets[index] >= stop:
                break
            if low < high:
                yield TensorRange(index, self.elements(index, low, high),
                                  slice(low - start, high - start))

    def elements(self, tensor: int, start: int, stop: int) -> slice:
        """The tensor's elements in the entries ``[start, stop)``, if any."""
        offset, size = self.offsets[tensor], self.gradients[tensor].size
        return slice(max(start - offset, 0) * self.grain,
                     min(max(stop - offset, 0) * self.grain, size))


def union(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in ranges that do not overlap, in order."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def array_module(*arrays: Any) -> Any:
    """``numpy`` if all arrays are NumPy's (or there are none), else CuPy."""
    if all(isinstance(array, numpy.ndarray) for array in arrays):
        return numpy
    import cupy
    return cupy


@dataclasses.dataclass
class Compiled:
    """A codec's part in one job.

    Attributes:
        codec: Its number.
        rounding: Number of the rounding, of fp8.
        format: Number of the records' format.
        epsilon: Of fp8.
        tensors: int64: where the tensor begins and ends in the fused vector,
            addresses: of its gradient, its parameter, what its mean is
            decoded into, and its residual (0: none); and its elements.
        scales: float32: the scale of encodings and its inverse, the same for
            decoding and for means, and the largest residual, of fp8.
        findings: int64: elements clipped, elements encoded, what is to blame
            for a wire that is not finite (1: gradient, 2: value; 4: it was
            not when it was decoded), and more than 0 where what was decoded
            is not finite.
        kept: Arrays whose addresses are in the tables.
    """

    codec: int
    tensors: numpy.ndarray
    findings: numpy.ndarray
    scales: numpy.ndarray
    rounding: int = 0
    format: int = 0
    epsilon: float = 0.0
    kept: list[Any] = dataclasses.field(default_factory=list)

    def decode_into(self, gradients: Sequence[numpy.ndarray]) -> bool:
        """Lets compiled code decode means into these; False if it cannot."""
        found = places(gradients, writeable=True)
        if found is None:
            return False
        self.tensors[:, _OUT] = found[:, 0]
        self.kept += gradients
        return True

    def fetch_parameters(self, tensors: Tensors,
                         owned: Sequence[tuple[int, int]]) -> None:
        """Copies parameters from a device to where compiled code reads them.

        Args:
            tensors: The fused vector.
            owned: Ranges of it; only elements in these are copied.  The
                address in the table is that of the tensor's first element
                all the same, which may not be there.
        """
        parts = [(index, part) for start, stop in union(owned)
                 for index, part, _ in tensors.overlaps(start, stop)]
        if not parts:
            return
        bounds: dict[int, tuple[int, int]] = {}     # of what is there
        for index, part in parts:
            start, _ = bounds.setdefault(index, (part.start, part.stop))
            bounds[index] = start, part.stop
        host = empty_wire(tensors.xp, sum(
            stop - start for start, stop in bounds.values()), numpy.float32)
        first, place = {}, 0    # by tensor, where its first element would be
        for index, (start, stop) in bounds.items():
            first[index] = place - start
            place += stop - start
            self.tensors[index, _PARAMETER] = (
                host.ctypes.data + first[index] * host.itemsize)
        for index, part in parts:
            download(tensors.parameters[index][part], host[
                first[index] + part.start:first[index] + part.stop])
        self.kept.append(host)

    def nonfinite(self, names: Sequence[str]) -> list[str]:
        """Names of the tensors whose decoded mean is not finite."""
        return [name for name, found in zip(
            names, self.findings[:, _NONFINITE].tolist(), strict=True)
            if found]

    def blamed(self, names: Sequence[str]) -> list[str]:
        """What made a wire not finite, e.g. ``'the gradient of /l1/W'``."""
        found = self.findings[:, _BLAMED].tolist()
        return [f'the {kind} of {name}'
                for kind, bit in (('gradient', 1), ('value', 2))
                for name, bits in zip(names, found, strict=True)
                if bits & bit]

    @property
    def wire_is_finite(self) -> bool:
        """Whether nothing that was decoded was a NaN or an infinity."""
        return not (self.findings[:, _BLAMED] & 4).any()

    def counts(self) -> list[list[int]]:
        """By tensor, elements clipped and elements encoded."""
        return self.findings[:, :2].tolist()


def compile_tensors(codec: int, tensors: Tensors,
                    residuals: Sequence[numpy.ndarray] = (),
                    **of_codec: Any) -> Compiled | None:
    """Makes the tables, except the addresses that means are decoded into.

    Args:
        codec: Its number.
        tensors: The fused vector.
        residuals: One for each gradient, as long; none without feedback.
        of_codec: Other attributes.

    Returns:
        None if compiled code cannot read these arrays.
    """
    gradients = places(tensors.gradients)
    parameters = places(tensors.parameters)
    if (gradients is None or parameters is None
            or (gradients[:, 1] != parameters[:, 1]).any()):
        return None
    made = compile_sizes(codec, tensors, **of_codec)
    made.tensors[:, 2] = gradients[:, 0]
    made.tensors[:, _PARAMETER] = parameters[:, 0]
    if residuals:
        found = places(residuals, writeable=True)
        assert found is not None
        assert (found[:, 1] == gradients[:, 1]).all()
        made.tensors[:, 5] = found[:, 0]
    made.kept += [*tensors.gradients, *tensors.parameters, *residuals]
    return made


def compile_sizes(codec: int, tensors: Tensors, **of_codec: Any) -> Compiled:
    """Makes the tables of a codec that neither reads nor writes gradients."""
    count = len(tensors.names)
    table = numpy.zeros((count, 7), numpy.int64)
    table[:, 0], table[:, 1] = tensors.offsets[:-1], tensors.offsets[1:]
    table[:, 6] = [gradient.size for gradient in tensors.gradients]
    of_codec.setdefault('scales', numpy.zeros((count, 5), numpy.float32))
    return Compiled(codec, table, numpy.zeros((count, 4), numpy.int64),
                    **of_codec)


def places(arrays: Sequence[Any], writeable: bool = False
           ) -> numpy.ndarray | None:
    """Address and number of elements of each array, int64 (n, 2).

    None if compiled code cannot use one of them: it is not on the host, not
    C-contiguous float32, or read-only where it is to be ``writeable``.
    """
    found = _places.places(list(arrays), writeable)
    return None if found is None else numpy.frombuffer(
        found, numpy.int64).reshape(-1, 2)
