"""Tensors of one update laid end to end, and what a codec does with them."""
from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from .. import formats
from ..formats import RecordFormat, _formats
from .staging import array_module, download, empty_wire, output, upload_now

if TYPE_CHECKING:
    from .codec import Codec, State

#: The site where gradients are encoded.
GRADIENT = 'gradient'

#: Numbers of codecs in compiled code; RELAY is fp8 without parameters.
FLOAT32, FLOAT16, FP8, RELAY, RECORDS = range(5)

# A tensor in compiled code: where it begins and ends in the fused vector,
# addresses of its gradient, its parameter, what its mean is decoded into, and
# its residual (0: none); its elements; the keys of its random numbers.
_COLUMNS = 8
_GRADIENT, _PARAMETER, _OUT, _RESIDUAL, _ELEMENTS, _KEYS = range(2, 8)

# What compiled code finds: elements clipped, elements encoded, what is to
# blame for a wire that is not finite (see _BLAMED), and more than 0 where
# what was decoded is not finite.
_CLIPPED, _ENCODED, _BLAME, _NONFINITE = range(4)
#: And the bits of the largest magnitude in an fp8 wire that was decoded, those
#: of a NaN if it was not finite; -1: nothing was.
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
             rounding: int = 0, format: RecordFormat | None = None,
             epsilon: float = 0.0, scales: Any = None,
             seed_of: Callable[[str, str], int] | None = None,
             relays: bool = False) -> None:
        """Makes the tables with which tensors are encoded in this update.

        Args:
            state: Of the model.
            number: Of the codec.
            prescale: Factor of gradients when they are encoded, of floats.
            rounding: Number of fp8's rounding.
            format: Of records.
            epsilon: Of fp8.
            scales: float32 rows: the scale of encodings and its inverse, the
                same for decoding and for means, and the largest residual, of
                fp8.
            seed_of: Seed of the random numbers of a tensor (by name) at a
                site; None: nothing is random.
            relays: There are no gradients and no parameters, and nothing is
                kept of means.

        Raises:
            ValueError: Compiled code cannot read an array.
        """
        self.state = state
        self.prescale, self.epsilon = prescale, epsilon
        self.seed_of = seed_of
        count = len(self.names)
        self.scales = numpy.asarray(
            numpy.zeros((count, 5)) if scales is None else scales,
            numpy.float32).reshape(count, 5)
        self._relays, self._format = relays, format
        self._number = number
        rows = self._rows = numpy.zeros((count, _COLUMNS), numpy.int64)
        self._findings = numpy.zeros((count, 5), numpy.int64)
        self._findings[:, LARGEST] = -1
        if number == FP8:
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
            if seed_of:
                rows[:, _KEYS] = [_keys(seed_of(GRADIENT, name))
                                  for name in self.names]
        self.tables = (number, rounding, format.number if format else 0,
                       state.codec.wire_dtype.itemsize, self.grain, prescale,
                       epsilon, rows, self.scales, self._findings)
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

    def largest(self, tensor: int, epsilon: float) -> tuple[float, float]:
        """The largest |g| / (|w| + epsilon), and |g|, of what is finite."""
        gradient, parameter = self.gradients[tensor], self.parameters[tensor]
        if self.xp is numpy:
            return _formats.largest(gradient, parameter, epsilon)
        size = abs(gradient)
        size[~self.xp.isfinite(size)] = 0
        ratio = size / (abs(parameter) + numpy.float32(epsilon))
        ratio[~(ratio >= 0)] = 0
        return (float(ratio.max()), float(size.max())) if size.size else (
            0.0, 0.0)

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
        there = self._on_device(wire)
        out = output(self.xp, there)
        for index, entries in self._whole_tensors():
            self._encode_on_device(index, out[entries])
        download(out, there)

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
            there = upload_now(self.xp, self._on_device(wire))
            for index, entries in self._whole_tensors():
                self._decode_on_device(index, there[entries])
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
            int64[sites, tensors, 2]: the address of the tensor's residual
            (of its first element, which may lie outside; 0: nothing is kept)
            and the keys of its random numbers.
        """
        sites = list(sites)
        found = numpy.zeros((len(sites), len(self.names), 2), numpy.int64)
        for row, (site, owned) in zip(found, sites, strict=True):
            if self.seed_of:
                row[:, 1] = [_keys(self.seed_of(site, name))
                             for name in self.names]
            if self._relays or not self.state.codec.error_feedback:
                continue
            kept, residuals = list(self.overlaps(*owned)), []
            for index, part in kept:
                name = self.names[index]
                residuals.append(self.state.residual(
                    numpy, site, name, part.start, part.stop))
            addresses = self._places(residuals, writeable=True)[:, 0].tolist()
            for (index, part), address in zip(kept, addresses, strict=True):
                row[index, 0] = address - part.start * _NOTHING.itemsize
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
        if wire.dtype.kind == 'f':
            wire *= wire.dtype.type(factor)
            return
        values = numpy.empty(wire.size, numpy.float32)
        formats.decode(wire, values)
        values *= numpy.float32(factor)
        formats.encode(
            values, wire, rounding=formats.ROUNDINGS[self.tables[1]],
            seed=self.seed_of('rescale', '') if self.seed_of else 0)

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

    def _encode_on_device(self, index: int, out: Any) -> None:
        gradient, name = self.gradients[index], self.names[index]
        scale, *_, bound = self.scales[index].tolist()
        residual = self.state.residual(
            self.xp, GRADIENT, name, 0, gradient.size
            ) if self.state.codec.error_feedback else None
        clipped = 0
        if self._number == FP8:
            clipped, nonfinite = formats.ratio_encode(
                gradient, self.parameters[index], out, scale=scale,
                epsilon=self.epsilon, residual=residual, bound=bound,
                rounding=formats.ROUNDINGS[self.tables[1]],
                seed=self.seed_of(GRADIENT, name) if self.seed_of else 0)
        elif self._format:
            nonfinite = self._format.encode(gradient, out, factor=scale,
                                            residual=residual)
        else:
            with numpy.errstate(over='ignore'):
                out[...] = gradient * numpy.float32(self.prescale)
            nonfinite = _count_nonfinite(out)
        self._findings[index, :2] += clipped, gradient.size
        if nonfinite:       # of a ratio, the parameter may be to blame
            is_value = self._number == FP8 and bool(
                self.xp.isfinite(gradient).all())
            self._findings[index, _BLAME] |= _BLAMED[
                'value' if is_value else 'gradient']

    def _decode_on_device(self, index: int, wire: Any) -> None:
        gradient, scale = (self.gradients[index],
                           float(self.scales[index, 2]))
        if self._number == FP8:
            nonfinite = formats.ratio_decode(
                wire, self.parameters[index], gradient, scale=scale,
                epsilon=self.epsilon)
            top = numpy.uint16(int((wire & numpy.uint8(0x7F)).max()) << 8)
            self._findings[index, LARGEST] = numpy.float32(
                top.view(numpy.float16)).view(numpy.int32)
        elif self._format:
            nonfinite = self._format.decode(wire, gradient, factor=scale)
        else:
            gradient[...] = wire
            nonfinite = _count_nonfinite(wire)
        self._findings[index, _NONFINITE] += nonfinite

    def _on_device(self, wire: numpy.ndarray) -> numpy.ndarray:
        """A wire as it is on a GPU, where there are no records."""
        return (wire if wire.dtype.kind != 'V' else
                wire.view(numpy.uint8).reshape(-1, wire.itemsize))

    def _whole_tensors(self) -> Iterator[tuple[int, slice]]:
        offsets = self.offsets
        return ((index, slice(*offsets[index:index + 2]))
                for index, size in enumerate(self.sizes) if size)

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
            download(self.parameters[index][start:stop], host)
            self._rows[index, _PARAMETER] = (
                host.ctypes.data - start * host.itemsize)
            self._kept.append(host)


def _keys(seed: int) -> int:
    """The two keys of random bits, as compiled code has them: low, high."""
    key0, key1 = formats.random_keys(seed)
    return key0 | (key1 - (key1 >> 31 << 32)) << 32


def _count_nonfinite(values: Any) -> int:
    """Counts values that are not finite, usually without a look at each.

    A sum is one fast pass and is never finite when an element is not; only
    where it overflows by itself are the elements looked at.
    """
    with numpy.errstate(invalid='ignore', over='ignore'):
        total = float(values.sum(dtype=numpy.float32))
    return 0 if numpy.isfinite(total) else values.size - int(
        array_module(values).isfinite(values).sum())


def places(arrays: Sequence[Any], writeable: bool = False
           ) -> numpy.ndarray | None:
    """Address and number of elements of each array, int64 (n, 2).

    None if compiled code cannot use one of them: it is not on the host, not
    C-contiguous float32, or read-only where it is to be ``writeable``.
    """
    found = _formats.places(list(arrays), writeable)
    return None if found is None else numpy.frombuffer(
        found, numpy.int64).reshape(-1, 2)
