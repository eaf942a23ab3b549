"""Tensors of one update laid end to end, and what a codec does with them."""
from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from .. import formats
from ..formats import _formats, gpu
from .staging import array_module, empty_wire

if TYPE_CHECKING:
    from .codec import Codec, State

#: The site where gradients are encoded.
GRADIENT = 'gradient'

#: Numbers of codecs in compiled code; RELAY is fp8 without parameters.
FLOAT32, FLOAT16, BFLOAT16, FP8, RELAY, RECORDS = range(6)
# Names of their kernels on a GPU; fp8's are those of its roundings.
_KERNELS = {FLOAT32: 'float32', FLOAT16: 'float16', BFLOAT16: 'bfloat16',
            RECORDS: 'int4'}

# A tensor in compiled code: where it begins and ends in the fused vector,
# addresses of its gradient, its parameter, what its mean is decoded into, and
# its residual (0: none); its elements.
_COLUMNS = 7
_GRADIENT, _PARAMETER, _OUT, _RESIDUAL, _ELEMENTS = range(2, 7)

# What compiled code finds: elements clipped, elements encoded, what is to
# blame for a wire that is not finite (see _BLAMED), and more than 0 where
# what was decoded is not finite.
_CLIPPED, _ENCODED, _BLAME, _NONFINITE = range(4)
#: And the bits of the largest magnitude in a wire that was decoded (of int4,
#: of its scales), those of a NaN if it was not finite; -1: nothing was.
LARGEST = 4
_BLAMED = {'gradient': 1, 'value': 2}
_BAD_WIRE = 4       # it was not finite when it was decoded

_NOTHING = numpy.zeros(0, numpy.float32)


class Tensors:
    """Parameter tensors and their gradients, fused into one vector.

    Nothing is copied: the fused vector is only a way of numbering elements
    (tensor fusion), so that small tensors need no message of their own.  Its
    entries are those of a wire: of ``grain`` elements each, of which a
    tensor's last one may have fewer.

    What a codec does with them in an update is added by :meth:`code`, which
    :meth:`.Codec.step` calls; see ``codec.py``.

    Args:
        names: One name per tensor, unique, in the same order on all ranks.
        gradients: Flat float32 arrays, all NumPy or all CuPy.
        parameters: Flat float32 arrays of the same sizes.
        loss_scale: Factor that the gradients carry (mixed precision).
        grain: Elements of an entry, see :attr:`.Codec.grain`.

    Attributes:
        sizes: Elements of each tensor.
        size: Number of entries of the fused vector.
        offsets: Index of each tensor's first entry, and ``size``.
        xp: ``numpy`` or ``cupy``.
        codec: What they are coded for; None before :meth:`code`.
        state: Of the model and that codec.
        tables: For compiled code; ``formats/coding.h`` reads them.
    """

    codec: Codec | None = None
    state: State
    tables: tuple

    def __init__(self, names: Iterable[str], gradients: Iterable[Any],
                 parameters: Iterable[Any], loss_scale: float = 1.0,
                 grain: int = 1) -> None:
        self.names = tuple(names)
        self.gradients = list(gradients)
        self.parameters = list(parameters)
        self.loss_scale = loss_scale
        self.grain = grain
        self.sizes: list[int] = []
        self.offsets = [0]
        for gradient in self.gradients:
            self.sizes.append(gradient.size)
            self.offsets.append(self.offsets[-1] - (-gradient.size // grain))
        self.size = self.offsets[-1]
        self.xp = array_module(self.gradients[0]) if self.sizes else numpy

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """The tensors in the entries ``[start, stop)``, in order.

        Yields the number of each that has elements there, and which those are.
        """
        first = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        for index in range(first, len(self.names)):
            offset, end = self.offsets[index:index + 2]
            low, high = max(offset, start), min(end, stop)
            if offset >= stop:
                break
            if low < high:
                yield index, self.elements(index, low, high)

    def elements(self, tensor: int, start: int, stop: int) -> slice:
        """The tensor's elements in the entries ``[start, stop)``, if any."""
        offset, size = self.offsets[tensor], self.sizes[tensor]
        return slice(max(start - offset, 0) * self.grain,
                     min(max(stop - offset, 0) * self.grain, size))

    def code(self, state: State, number: int, *, prescale: float = 1.0,
             rounding: int = 0, epsilon: float = 0.0, scales: Any = None,
             relays: bool = False) -> None:
        """Makes the tables with which tensors are encoded in this update.

        Args:
            state: Of the model.
            number: Of the codec.
            prescale: Factor of gradients when they are encoded, of floats.
            rounding: Number of fp8's rounding.
            epsilon: Of fp8.
            scales: float32 rows: the scale of encodings and its inverse, the
                same for decoding and for means, and the largest residual, of
                fp8.
            relays: There are no gradients and no parameters, and nothing is
                kept of means.

        Raises:
            ValueError: Compiled code cannot read an array.
        """
        self.state = state
        self._prescale, self._epsilon = prescale, epsilon
        self._rounding = formats.ROUNDINGS[rounding]
        count = len(self.names)
        self.scales = numpy.asarray(
            numpy.zeros((count, 5)) if scales is None else scales,
            numpy.float32).reshape(count, 5)
        self._relays = relays
        self._number = number
        rows = self._rows = numpy.zeros((count, _COLUMNS), numpy.int64)
        self._findings = numpy.zeros((count, 5), numpy.int64)
        self._findings[:, LARGEST] = -1
        if not relays:
            state.watch(self.names, self._findings)
        self._kept: list[Any] = []      # arrays whose addresses are in tables
        rows[:, 0], rows[:, 1] = self.offsets[:-1], self.offsets[1:]
        rows[:, _ELEMENTS] = self.sizes
        if not relays and self.xp is numpy:
            gradients = self._places(self.gradients)
            parameters = self._places(self.parameters)
            if (gradients[:, 1] != parameters[:, 1]).any():
                raise ValueError('gradients and parameters differ in size')
            rows[:, _GRADIENT] = gradients[:, 0]
            rows[:, _PARAMETER] = parameters[:, 0]
            if state.codec.error_feedback:
                rows[:, _RESIDUAL] = self._places([
                    state.residual(numpy, GRADIENT, name, 0, size)
                    if size else _NOTHING for name, size
                    in zip(self.names, self.sizes, strict=True)],
                    writeable=True)[:, 0]
        self.tables = (number, rounding, state.codec.wire_dtype.itemsize,
                       self.grain, prescale, epsilon, rows, self.scales,
                       self._findings)
        self.codec = state.codec

    def _places(self, arrays: Sequence[Any], writeable: bool = False
                ) -> numpy.ndarray:
        """Addresses and sizes; the arrays are kept as long as this is."""
        found = places(arrays, writeable)
        if found is None:
            raise ValueError('gradients and parameters must be float32, '
                             'C-contiguous and, to be decoded into, writeable')
        self._kept += arrays
        return found

    # --- gradients and their means ------------------------------------------

    def largest(self, tensors: Sequence[int], epsilon: float
                ) -> list[tuple[float, float]]:
        """The largest |g| / (|w| + epsilon), and |g|, of what is finite.

        Args:
            tensors: Numbers of those that are meant.
            epsilon: As above.
        """
        if self.xp is numpy:
            return [_formats.largest(self.gradients[index],
                                     self.parameters[index], epsilon)
                    for index in tensors]
        found = self._run('largest', (_GRADIENT, _PARAMETER), epsilon).get()
        bits = found[:, :2].astype(numpy.int32).view(numpy.float32)
        return [tuple(bits[index].tolist()) for index in tensors]

    def encode(self, wire: numpy.ndarray, start: int = 0) -> None:
        """Writes gradients, times the prescale, into a piece of the wire.

        Args:
            wire: All of the wire, or, on the host, a piece; each element is
                to be encoded once.
            start: Where in the fused vector the piece begins.
        """
        if self.xp is numpy:
            self._code('encode', start, wire)
            return
        there = self.xp.empty(wire.nbytes, numpy.uint8)
        found = self._run(
            f'encode_{self._kernel}', (_GRADIENT, _PARAMETER, _RESIDUAL),
            self._epsilon, there)
        there.get(out=wire.view(numpy.uint8))       # waits
        clipped, blamed, *_ = found.get().T
        self._findings[:, _CLIPPED] += clipped
        self._findings[:, _ENCODED] += self.sizes
        # A gradient is to blame before the value of its parameter.
        self._findings[:, _BLAME] |= blamed & ~(2 * (blamed & 1))

    def decode(self, wire: numpy.ndarray, start: int = 0) -> list[str]:
        """Writes the values of a piece of the wire into the gradients.

        Returns:
            Names of tensors to which a NaN or an infinity was written so far.
        """
        if self.xp is numpy:
            if not self._rows[:, _OUT].any():
                self.decode_into(self.gradients)
            self._code('decode', start, wire)
        else:
            self._decode_on_device(wire)
        return self.nonfinite

    def decode_into(self, gradients: Sequence[Any]) -> None:
        """Has means decoded into these arrays from now on.

        Raises:
            ValueError: Compiled code cannot write one.
        """
        self.gradients = list(gradients)
        if self.xp is numpy and self.codec:
            self._rows[:, _OUT] = self._places(gradients, writeable=True)[:, 0]

    def means(self, sites: Iterable[tuple[str, tuple[int, int]]]
              ) -> numpy.ndarray:
        """The table with which compiled code encodes means; call it once.

        Args:
            sites: Places of the algorithm where this rank encodes means, each
                with the range of the fused vector that it encodes there.

        Returns:
            int64[sites, tensors]: the address of the tensor's residual (of
            its first element, which may lie outside; 0: nothing is kept).
        """
        sites = list(sites)
        found = numpy.zeros((len(sites), len(self.names)), numpy.int64)
        for row, (site, owned) in zip(found, sites, strict=True):
            if self._relays or not self.state.codec.error_feedback:
                continue
            kept, residuals = list(self.overlaps(*owned)), []
            for index, part in kept:
                name = self.names[index]
                residuals.append(self.state.residual(
                    numpy, site, name, part.start, part.stop))
            addresses = self._places(residuals, writeable=True)[:, 0].tolist()
            for (index, part), address in zip(kept, addresses, strict=True):
                row[index] = address - part.start * _NOTHING.itemsize
        if self.xp is not numpy and self._number == FP8:
            self._fetch_parameters([owned for _, owned in sites])
        return found

    def mean(self, total: numpy.ndarray, count: int, wire: numpy.ndarray,
             start: int, means: numpy.ndarray) -> None:
        """Writes ``total / count`` into a piece of the wire, on the host.

        Args:
            total: float32[n * grain], sums of wires; overwritten.
            count: How many were summed.
            wire: The piece, of n entries.
            start: Where in the fused vector it begins.
            means: What :meth:`means` found for the site.
        """
        self._code('mean', start, wire, total, count,
                   numpy.ascontiguousarray(means))

    # --- wires --------------------------------------------------------------

    def accumulate(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """``total += wire``, in float32, on the host.

        Args:
            wire: Of n entries.
            total: float32[n * grain].
        """
        self._code('sum', 0, wire, total)

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """``total += wire``, both in the wire's own format.

        Raises:
            TypeError: The format has no sums: records.
        """
        self._must_have_sums()
        self._code('+', 0, total, wire)

    def rescale(self, wire: numpy.ndarray, factor: float) -> None:
        """``wire *= factor``, in the wire's own format; raises as above."""
        self._must_have_sums()
        values = numpy.zeros(wire.size, numpy.float32)
        self.accumulate(wire, values)
        values *= numpy.float32(factor)
        if self._number == FP8:
            formats.encode(values, wire, rounding=self._rounding)
        else:
            self.mean(values, 1, wire, 0, self.means([('', (0, 0))])[0])

    # --- what was found -----------------------------------------------------

    @property
    def nonfinite(self) -> list[str]:
        """Names of the tensors whose decoded mean is not finite."""
        return [*itertools.compress(
            self.names, self._findings[:, _NONFINITE].tolist())]

    @property
    def wire_is_finite(self) -> bool:
        """Whether nothing that was decoded was a NaN or an infinity.

        Only compiled code sees it: gradients on a GPU may be not finite
        though the wire was.
        """
        return not (self._findings[:, _BLAME] & _BAD_WIRE).any()

    def conclude(self) -> None:
        """Adds what has been found since the last call to the state."""
        found, names = self._findings, self.names
        for kind, bit in _BLAMED.items():
            for index in numpy.flatnonzero(found[:, _BLAME] & bit):
                self.state.blame(f'the {kind} of {names[index]}')
        if self._number == FP8:
            clipped = self.state.numbers.setdefault('clipped', {})
            encoded = self.state.numbers.setdefault('encoded', {})
            for name, size, counts in zip(
                    names, self.sizes, found[:, :2].tolist(), strict=True):
                if size:
                    clipped[name] = clipped.get(name, 0) + counts[_CLIPPED]
                    encoded[name] = encoded.get(name, 0) + counts[_ENCODED]
        found[:, :2] = 0

    # --- on a GPU -----------------------------------------------------------

    @property
    def _kernel(self) -> str:
        return _KERNELS.get(self._number, self._rounding)

    def _run(self, kernel: str, columns: Sequence[int], epsilon: float,
             *wires: Any) -> Any:
        """Starts a kernel over all tensors.

        Args:
            kernel: Its name.
            columns: Which addresses of the table it reads or writes.
            epsilon: Of fp8.
            wires: What it reads or writes beside.

        Returns:
            int32[tensors, 4] of what it finds, on the device.
        """
        rows = numpy.zeros((len(self.names), _COLUMNS), numpy.int64)
        rows[:, 0], rows[:, 1] = self.offsets[:-1], self.offsets[1:]
        rows[:, _ELEMENTS] = self.sizes
        arrays: dict[int, Sequence[Any]] = {
            _GRADIENT: self.gradients, _PARAMETER: self.parameters,
                  _OUT: self.gradients}
        if _RESIDUAL in columns and self.state.codec.error_feedback:
            arrays[_RESIDUAL] = [
                self.state.residual(self.xp, GRADIENT, name, 0, size)
                if size else gradient for name, size, gradient
                in zip(self.names, self.sizes, self.gradients, strict=True)]
        for column in arrays.keys() & {*columns}:
            rows[:, column] = [array.data.ptr for array in arrays[column]]
        scales = (self.scales if self.codec else
                  numpy.zeros((len(self.names), 5), numpy.float32))
        found = self.xp.zeros((len(self.names), gpu.FINDINGS), numpy.int32)
        gpu.kernel(kernel)(
            self.xp.asarray(rows), self.xp.asarray(scales),
            numpy.int32(len(self.names)),
            numpy.float32(self._prescale if self.codec else 1),
            numpy.float32(epsilon), *wires, found, size=self.size)
        return found

    def _decode_on_device(self, wire: numpy.ndarray) -> None:
        there = self.xp.empty(wire.nbytes, numpy.uint8)
        there.set(wire.view(numpy.uint8))
        found = self._run(f'decode_{self._kernel}', (_OUT, _PARAMETER),
                          self._epsilon, there).get()
        # That was waited for, and so the wire has been read.
        self._findings[:, _NONFINITE] += found[:, 2]
        self._findings[:, LARGEST] = numpy.where(self.sizes, found[:, 3], -1)

    # --- details ------------------------------------------------------------

    def _code(self, what: str, start: int, wire: Any, other: Any = None,
              count: int = 0, means: Any = None) -> None:
        _formats.code(what, self.tables, start, wire.view(numpy.uint8), other
                      if other is None else other.view(numpy.uint8), count,
                      means)

    def _must_have_sums(self) -> None:
        if self._number == RECORDS:
            raise TypeError(f'{self.state.codec.name} has no sums')

    def _fetch_parameters(self, owned: Sequence[tuple[int, int]]) -> None:
        """Copies parameters from a device to where compiled code reads them.

        Of each only what lies from the first to the last of these ranges; the
        address in the table is that of the first element all the same.
        """
        spans: dict[int, tuple[int, int]] = {}
        for start, stop in owned:
            for index, part in self.overlaps(start, stop):
                first, last = spans.get(index, (part.start, part.stop))
                spans[index] = min(first, part.start), max(last, part.stop)
        for index, (start, stop) in spans.items():
            host = empty_wire(self.xp, stop - start, numpy.float32)
            self.parameters[index][start:stop].get(out=host)
            self._rows[index, _PARAMETER] = (
                host.ctypes.data - start * host.itemsize)
            self._kept.append(host)


def places(arrays: Sequence[Any], writeable: bool = False
           ) -> numpy.ndarray | None:
    """Address and number of elements of each array, int64 (n, 2).

    None if compiled code cannot use one of them: it is not on the host, not
    C-contiguous float32, or read-only where it is to be ``writeable``.
    """
    found = _formats.places(list(arrays), writeable)
    return None if found is None else numpy.frombuffer(
        found, numpy.int64).reshape(-1, 2)
