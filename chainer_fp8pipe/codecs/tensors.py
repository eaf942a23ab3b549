"""Tensors of one update laid end to end, and what a codec does with them."""
from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from .. import formats
from ..formats import gpu
from .staging import array_module, empty_wire

if TYPE_CHECKING:
    from .codec import State

#: The site where gradients are encoded.
GRADIENT = 'gradient'

#: Numbers of codecs in compiled code; RELAY is fp8 without parameters.
FLOAT32, FLOAT16, BFLOAT16, FP8, RELAY, RECORDS = range(6)
# Names of their kernels on a GPU; fp8's are those of its roundings.
_KERNELS = {FLOAT32: 'float32', FLOAT16: 'float16', BFLOAT16: 'bfloat16',
            RECORDS: 'int4'}

# A tensor in compiled code: where it begins and ends in the fused vector;
# addresses of its gradient, its parameter, what its mean is decoded into, and
# its residual before and after (0: none); its elements.
_GRADIENT, _PARAMETER, _OUT, _RESIDUAL, _LEFT, _ELEMENTS = range(2, 8)

# What compiled code finds: elements clipped and encoded, what is to blame for
# a wire that is not finite (_BLAMED), and whether what was decoded is not.
_CLIPPED, _ENCODED, _BLAME, _NONFINITE = range(4)
#: And the bits of the largest magnitude in a wire that was decoded (of int4,
#: of its scales), those of a NaN if it was not finite; -1: nothing was.
LARGEST = 4
_BLAMED = {'gradient': 1, 'value': 2}
_INFINITY = 0x7F800000

_NOTHING = numpy.zeros(0, numpy.float32)


class Coding(ctypes.Structure):
    """How tensors are encoded and decoded: ``formats/coding.h``'s struct."""

    _fields_ = (
        ('codec', ctypes.c_int), ('rounding', ctypes.c_int),
        ('itemsize', ctypes.c_size_t), ('grain', ctypes.c_int64),
        ('prescale', ctypes.c_float), ('epsilon', ctypes.c_float),
        ('tensors_count', ctypes.c_int64), ('tensors', ctypes.c_void_p),
        ('scales', ctypes.c_void_p), ('findings', ctypes.c_void_p))


class _Range(ctypes.Structure):
    _fields_ = ('start', ctypes.c_int64), ('stop', ctypes.c_int64)


class Layout:
    """Where tensors are in one vector, end to end (tensor fusion).

    Its entries are those of a wire: of ``grain`` elements each, of which a
    tensor's last one may have fewer.

    Args:
        names: One name per tensor, unique, in the same order on all ranks.
        sizes: Elements of each tensor.
        grain: Elements of an entry, see :attr:`.Codec.grain`.

    Attributes:
        names, sizes, grain: As given.
        size: Number of entries of the fused vector.
        offsets: Index of each tensor's first entry, and ``size``.
    """

    def __init__(self, names: Iterable[str], sizes: Iterable[int],
                 grain: int) -> None:
        self.names, self.sizes, self.grain = tuple(names), [*sizes], grain
        self.offsets = [*itertools.accumulate(
            (-(-size // grain) for size in self.sizes), initial=0)]
        self.size = self.offsets[-1]

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
                yield index, slice(
                    (low - offset) * self.grain,
                    min((high - offset) * self.grain, self.sizes[index]))


class Tensors(Layout):
    """Parameter tensors and their gradients, fused into one vector.

    Nothing is copied: the vector only numbers elements.  What a codec does
    with them is added by :meth:`code`, which :meth:`.Codec.step` calls.

    Args:
        names: One per tensor, see :class:`Layout`.
        gradients: Flat float32 arrays, all NumPy or all CuPy.
        parameters: Flat float32 arrays of the same sizes.
        grain: Elements of an entry, see :class:`Layout`.

    Attributes:
        xp: ``numpy`` or ``cupy``.
        state: Of the model and the codec; None before :meth:`code`.
        coding: For compiled code, which reads what this has.
    """

    state: Any = None           # State | None
    coding: Coding

    def __init__(self, names: Iterable[str], gradients: Iterable[Any],
                 parameters: Iterable[Any], grain: int = 1) -> None:
        self.gradients = list(gradients)
        self.parameters = list(parameters)
        super().__init__(names, (one.size for one in self.gradients), grain)
        self.xp = array_module(self.gradients[0]) if self.sizes else numpy

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
        self.state, self._relays = state, relays
        self._kept: list[Any] = []      # arrays whose addresses are in tables
        count = len(self.names)
        self._scales = numpy.zeros((count, 5), numpy.float32)
        if scales is not None:
            self._scales[:] = numpy.reshape(scales, (count, 5))
        self._findings = numpy.zeros((count, 5), numpy.int64)
        self._findings[:, LARGEST] = -1
        rows = self._rows = self._table(relays)
        if not relays:
            state.decoded.update(zip(self.names, self._findings, strict=True))
            if state.codec.error_feedback:
                pairs = [state.residual(self.xp, GRADIENT, name, 0, size)
                         if size else (_NOTHING, _NOTHING) for name, size
                         in zip(self.names, self.sizes, strict=True)]
                for column, arrays in zip((_RESIDUAL, _LEFT), zip(
                        *pairs, strict=True), strict=False):
                    rows[:, column] = self._places(arrays, True)[:, 0]
        # Of gradients on a GPU: means are made on the host.
        self._there = rows if self.xp is numpy else rows.copy()
        self.coding = Coding(
            number, rounding, state.codec.wire_dtype.itemsize, self.grain,
            prescale, epsilon, count, rows.ctypes.data,
            self._scales.ctypes.data, self._findings.ctypes.data)

    def _table(self, relays: bool = False) -> numpy.ndarray:
        """A row for each tensor, where gradients and parameters are."""
        rows = numpy.zeros((len(self.names), _ELEMENTS + 1), numpy.int64)
        rows[:, 0], rows[:, 1] = self.offsets[:-1], self.offsets[1:]
        rows[:, _ELEMENTS] = self.sizes
        if not relays:
            for column, arrays in ((_GRADIENT, self.gradients),
                                   (_PARAMETER, self.parameters)):
                found = self._places(arrays)
                if (found[:, 1] != self.sizes).any():
                    raise ValueError(
                        'gradients and parameters differ in size')
                rows[:, column] = found[:, 0]
        return rows

    def _places(self, arrays: Sequence[Any], writeable: bool = False
                ) -> numpy.ndarray:
        """Addresses and sizes; the arrays are kept as long as this is."""
        found = places(arrays, writeable)
        if found is None and self.xp is not numpy:
            found = numpy.array(
                [(array.data.ptr if array.size else 0, array.size)
                 for array in arrays], numpy.int64).reshape(-1, 2)
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
        self._kept = []
        rows, found = self._table(), numpy.zeros((len(self.names), 2), 'i4')
        if self.xp is not numpy:
            found = self._run('largest', rows, self.xp.empty(0, 'f4'), 1.0,
                              epsilon).get()[:, :2].copy()
        else:
            for index in tensors:
                formats.library().largest_ratio(
                    *map(ctypes.c_void_p, rows[index, 2:4].tolist()),
                    ctypes.c_size_t(self.sizes[index]),
                    ctypes.c_float(epsilon), _at(found[index]))
        bits = found.view(numpy.float32)
        return [tuple(bits[index].tolist()) for index in tensors]

    def encode(self, wire: numpy.ndarray, start: int = 0) -> None:
        """Writes gradients, times the prescale, into the wire.

        On the host that may be a piece, which begins at ``start``.
        """
        if self.xp is numpy:
            self._call('encode_range', start, wire)
            return
        there = self.xp.empty(wire.nbytes, numpy.uint8)
        found = self._code_there('encode', there)
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
        if not self._there[:, _OUT].any():
            self.decode_into(self.gradients)
        if self.xp is numpy:
            self._call('decode_range', start, wire)
        else:
            there = self.xp.empty(wire.nbytes, numpy.uint8)
            there.set(wire.view(numpy.uint8))
            found = self._code_there('decode', there).get()
            # That was waited for, and so the wire has been read.
            self._findings[:, _NONFINITE] += found[:, 2]
            self._findings[:, LARGEST] = numpy.where(
                self.sizes, found[:, 3], -1)
        return self.nonfinite

    def decode_into(self, gradients: Sequence[Any]) -> None:
        """Has means decoded into these arrays from now on.

        Raises:
            ValueError: Compiled code cannot write one.
        """
        self.gradients = list(gradients)
        if self.state:
            self._there[:, _OUT] = self._places(gradients, True)[:, 0]

    def means(self, sites: Iterable[tuple[str, tuple[int, int]]]
              ) -> numpy.ndarray:
        """The table with which compiled code encodes means; it is kept.

        Args:
            sites: Places of the algorithm where this rank encodes means, each
                with the range of the fused vector that it encodes there.

        Returns:
            int64[sites, tensors, 2]: addresses of the tensor's residual before
            and after (of its first element, which may lie outside; 0: nothing
            is kept).
        """
        sites = list(sites)
        found = numpy.zeros((len(sites), len(self.names), 2), numpy.int64)
        self._kept.append(found)
        for row, (site, owned) in zip(found, sites, strict=True):
            if self._relays or not self.state.codec.error_feedback:
                continue
            owners = [*self.overlaps(*owned)]
            pairs = [self.state.residual(
                numpy, site, self.names[index], part.start, part.stop)
                for index, part in owners]
            for column, arrays in enumerate(zip(*pairs, strict=True)):
                row[[index for index, _ in owners], column] = self._places(
                    arrays, True)[:, 0] - [
                        part.start * _NOTHING.itemsize for _, part in owners]
        if self.xp is not numpy and self.coding.codec == FP8:
            self._fetch_parameters([owned for _, owned in sites])
        return found

    def mean(self, total: numpy.ndarray, count: int, wire: numpy.ndarray,
             start: int, means: numpy.ndarray) -> None:
        """Writes ``total / count`` into a piece of the wire, on the host.

        Args:
            total: float32[n * grain], sums of wires; overwritten.
            count: How many were summed.
            wire: The piece, of n entries, which begins at ``start``.
            means: What :meth:`means` found for the site.
        """
        self._call('encode_mean', start, wire, _at(total), count, _at(means))

    # --- wires --------------------------------------------------------------

    def accumulate(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """``total += wire``, in float32[n * grain], on the host."""
        formats.library().accumulate_wire(
            ctypes.byref(self.coding), _at(wire), _at(total),
            ctypes.c_size_t(wire.size))

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """``total += wire``, both in the wire's own format, not of records.
        """
        self._sum((wire, total), 1.0, total)

    def rescale(self, wire: numpy.ndarray, factor: float) -> None:
        """``wire *= factor``, in the wire's own format."""
        self._sum((wire,), factor, wire)

    def _sum(self, wires: Iterable[numpy.ndarray], factor: float,
             out: numpy.ndarray) -> None:
        # The sum of two values is exact, or far from a tie.
        values = numpy.full(out.size, -0.0, numpy.float32)
        for wire in wires:
            self.accumulate(wire, values)
        values *= numpy.float32(factor)
        if self.coding.codec == FP8:
            formats.encode(values, out, rounding=formats.ROUNDINGS[
                self.coding.rounding])
        else:
            self.mean(values, 1, out, 0, numpy.zeros(0))

    # --- what was found -----------------------------------------------------

    @property
    def nonfinite(self) -> list[str]:
        """Names of the tensors whose decoded mean is not finite."""
        return [*itertools.compress(
            self.names, self._findings[:, _NONFINITE].tolist())]

    @property
    def wire_is_finite(self) -> bool:
        """Whether nothing in a wire that was decoded is NaN or infinite."""
        bad = self._findings[:, _NONFINITE] > 0
        if self.coding.codec == FP8:    # or else a parameter is
            bad &= self._findings[:, LARGEST] >= _INFINITY
        return not bad.any()

    def conclude(self) -> None:
        """Adds what has been found since the last call to the state."""
        found, names = self._findings, self.names
        for kind, bit in _BLAMED.items():
            for index in numpy.flatnonzero(found[:, _BLAME] & bit):
                what = f'the {kind} of {names[index]}'
                if what not in self.state.nonfinite:
                    self.state.nonfinite.append(what)
        if self.coding.codec == FP8:
            clipped = self.state.numbers.setdefault('clipped', {})
            encoded = self.state.numbers.setdefault('encoded', {})
            for name, size, counts in zip(
                    names, self.sizes, found[:, :2].tolist(), strict=True):
                if size:
                    clipped[name] = clipped.get(name, 0) + counts[_CLIPPED]
                    encoded[name] = encoded.get(name, 0) + counts[_ENCODED]
        found[:, :2] = 0

    # --- on a GPU -----------------------------------------------------------

    def _code_there(self, direction: str, wire: Any) -> Any:
        kernel = _KERNELS.get(self.coding.codec,
                              formats.ROUNDINGS[self.coding.rounding])
        return self._run(f'{direction}_{kernel}', self._there, self._scales,
                         self.coding.prescale, self.coding.epsilon, wire)

    def _run(self, kernel: str, rows: numpy.ndarray, scales: Any,
             prescale: float, epsilon: float, *wire: Any) -> Any:
        """Starts a kernel; int32[tensors, 4] of what it finds, there."""
        found = self.xp.zeros((len(rows), gpu.FINDINGS), numpy.int32)
        gpu.kernel(kernel)(
            self.xp.asarray(rows), self.xp.asarray(scales),
            numpy.int32(len(rows)), numpy.float32(prescale),
            numpy.float32(epsilon), *wire, found, size=self.size)
        return found

    # --- details ------------------------------------------------------------

    def _call(self, function: str, start: int, wire: numpy.ndarray,
              *more: Any) -> None:
        """Calls compiled code for the piece of the vector that a wire is."""
        getattr(formats.library(), function)(
            ctypes.byref(self.coding), _Range(start, start + wire.size),
            _at(wire), *more)

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
    library = formats.library(python=True)
    library.places.restype = ctypes.py_object
    found = library.places(ctypes.py_object(list(arrays)), int(writeable))
    return None if found is None else numpy.frombuffer(
        found, numpy.int64).reshape(-1, 2)


def _at(array: numpy.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
