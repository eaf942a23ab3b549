"""Codecs: how gradients become a wire, and what is learnt from them."""
# A codec is options only: immutable, the same on all ranks, and cheap to send
# to a rank that has no model.  What it learns of a model is a State, which one
# codec reads and writes, and which snapshots hold.  An update goes
#
#     codec.begin(state, loss_scale)
#     found = codec.propose(state, tensors)     # e.g. new scales
#     ...                                       # the largest of all ranks
#     codec.step(state, tensors, found)
#     tensors.encode(wire)                      # this rank's gradients
#     ...                                       # bytes travel, means are made
#     tensors.decode(wire)                      # means into the gradients
#     tensors.conclude()                        # counts, to the state
#
# After `begin` the tensors may come in groups (buckets), each with a wire, a
# `propose` and a `step` of its own, in any order.
#
# Tensors that are coded are data: tables of addresses and scales, on which
# compiled code works, called from here or by an all-reduce, piece by piece or
# in one go with the same bits.  Only gradients on a GPU are encoded and
# decoded there.
#
# fp8 (fp8.py) has a scale for each tensor, from the ratio of gradients to
# their parameters.  Records of 4 bits have one for each 32 elements, which
# follows from the gradients alone.  Of an element that is ten times as large
# as the 31 beside it, an outlier, no more is added to the next encoding than
# these have, or it would keep them out of their records at the next updates.
#
# Error feedback: what an encoding leaves out of a number is added to it at the
# next update, where gradients are sent and where means are (on both sides:
# Tang et al., "DoubleSqueeze", ICML 2019, Algorithm 1).  There is one residual
# for each tensor at each *site*: a place of an algorithm where the tensor, or
# the part of it that this rank looks after, is encoded.  When the part becomes
# another one, because tensors joined or left, its residual starts from zero.
from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy

from ..formats import RECORD, RECORD_BYTES, ROUNDINGS
from .staging import to_host
from .tensors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LARGEST,
    RECORDS,
    Tensors,
)


@dataclasses.dataclass(eq=False)
class State:
    """What a codec keeps of one model from one update to the next.

    Attributes:
        codec: The codec.
        updates: How many were begun.
        loss_scale: The factor of the last update's gradients, in whose units
            residuals are.
        numbers: By kind and tensor, what was learnt and counted.
        nonfinite: What on this rank made a wire of this update hold a NaN or
            an infinity, e.g. ``'the gradient of /l1/W'``.
        decoded: By tensor, what was found in its mean (:class:`.Tensors`).
    """

    codec: Codec
    updates: int = 0
    loss_scale: float = 1.0
    numbers: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=dict)
    nonfinite: list[str] = dataclasses.field(default_factory=list)
    # By site and tensor: where its part begins, and a float32 array.
    _residuals: dict[tuple[str, str], tuple[int, Any]] = dataclasses.field(
        default_factory=dict)
    # By the same, arrays that are written next; what undo() goes back to.
    _spare: dict[tuple[str, str], Any] = dataclasses.field(
        default_factory=dict)
    _held: tuple[dict[tuple[str, str], tuple[int, Any]],
                 dict[str, dict[str, float]]] | None = None
    decoded: dict[str, Any] = dataclasses.field(default_factory=dict)

    def hold(self) -> None:
        """From here on :meth:`undo` can put back what this update changes."""
        self._held = dict(self._residuals), {
            kind: dict(values) for kind, values in self.numbers.items()}

    def keep(self) -> None:
        """The update is over, and nothing of it is put back."""
        self._held = None

    def undo(self) -> None:
        """Nothing of the update has happened since :meth:`hold`."""
        if self._held is None:
            return
        self.take_largest()         # of means that nobody uses
        (residuals, numbers), self._held = self._held, None
        for key, (_, array) in self._residuals.items():
            if residuals.get(key, (0, None))[1] is not array:
                self._spare[key] = array
        self._residuals, self.numbers = residuals, numbers
        self.updates -= 1
        self.nonfinite = []

    def residual(self, xp: Any, site: str, name: str, start: int, stop: int
                 ) -> tuple[Any, Any]:
        """The residual of ``[start, stop)`` of a tensor at a site.

        Two float32 arrays of ``xp``: what was left out, and where to write
        what is left out now.  They are one, unless that may be undone: then
        two arrays take turns.
        """
        key = site, name
        kept, array = self._residuals.get(key, (start, None))
        if array is None or (kept, array.size) != (start, stop - start):
            array = xp.zeros(stop - start, numpy.float32)
        elif not isinstance(array, xp.ndarray):
            # Was restored, or its tensor has moved.
            array = (to_host(array) if xp is numpy else xp.asarray(array))
        left = array
        if self._held is not None:
            left = self._spare.get(key)
            if not (isinstance(left, xp.ndarray) and left.size == array.size):
                left = xp.empty(array.size, numpy.float32)
            self._spare[key] = array
        self._residuals[key] = start, left
        return array, left

    def multiply_residuals(self, factor: float, name: str | None = None
                           ) -> None:
        """Multiplies residuals, as their gradients are.

        Args:
            factor: By which.
            name: Of a tensor; None: of all.
        """
        for (_, tensor), (_, array) in self._residuals.items():
            if name in (None, tensor):
                array *= numpy.float32(factor)

    def limit_residuals(self, name: str, bound: float) -> None:
        """Gives up what is larger than that in a tensor's residuals."""
        for key, (start, array) in self._residuals.items():
            if key[1] == name:
                self._residuals[key] = start, array * (
                    abs(array) <= numpy.float32(bound))

    def take_largest(self) -> dict[str, float]:
        """The largest magnitude in the wire of each mean decoded since then.

        All ranks have decoded the same, so that it is the same for all.
        NaN where the mean is not finite.
        """
        bits = numpy.array([row[LARGEST] for row in self.decoded.values()],
                           numpy.int32)
        found = {name: largest for name, bit, largest in zip(
            self.decoded, bits.tolist(), bits.view(numpy.float32).tolist(),
            strict=True) if bit >= 0}
        self.decoded.clear()
        return found

    def save(self) -> dict[str, numpy.ndarray]:
        """Returns what an exact continuation after whole updates needs."""
        if self._held is None:
            self.codec.settle(self)
        residuals, numbers = self._held or (self._residuals, self.numbers)
        return {
            'codec': numpy.frombuffer(self.codec.name.encode(), numpy.uint8),
            'updates': numpy.asarray(self.updates - bool(self._held)),
            'loss_scale': numpy.asarray(self.loss_scale),
            **{f'{kind}|{name}': numpy.asarray(value)
               for kind, values in numbers.items()
               for name, value in values.items()},
            **{f'residual|{start}|{start + array.size}|{site}|{name}':
               to_host(array) for (site, name), (start, array)
               in residuals.items()}}

    @classmethod
    def load(cls, codec: Codec, saved: Mapping[str, numpy.ndarray]
             ) -> State:
        """Restores what :meth:`save` returned, of a codec of the same name.

        Raises:
            ValueError: It is of another codec, or is damaged.
        """
        found = bytes(numpy.asarray(saved.get('codec', ()), numpy.uint8))
        if found != codec.name.encode():
            raise ValueError(f'this is no state of the {codec.name} codec: '
                             + (found.decode(errors='replace')
                                or str(sorted(saved))))
        state = cls(codec, int(saved['updates']), float(saved['loss_scale']))
        for key, array in saved.items():
            kind, separator, name = key.partition('|')
            if kind != 'residual':
                if separator:
                    state.numbers.setdefault(kind, {})[name] = array.item()
                continue
            start, stop, site, name = name.split('|', 3)
            if (array.shape != (int(stop) - int(start),)
                    or array.dtype != numpy.float32):
                raise ValueError(
                    f'the residual of {name} is of elements {start} to '
                    f'{stop}, but it is {array.dtype} {array.shape}: the '
                    'snapshot is damaged')
            state._residuals[site, name] = int(start), numpy.array(array)
        return state


class Codec(abc.ABC):
    """How gradients are encoded; subclasses are frozen dataclasses.

    Attributes:
        name: As in ``create_communicator``.
        wire_dtype: Of a wire, a one-dimensional host array.
        grain: Elements of a tensor to an entry of the wire; the tensor's last
            entry may have fewer.
        error_feedback: Whether residuals are carried to the next update.
        relays_as: The number in compiled code of :meth:`relay`.
        rounding: Of fp8.
    """

    name: Any       # str; of the class or of the options
    wire_dtype: Any     # numpy.dtype
    error_feedback: Any     # bool
    relays_as: Any      # int
    grain: ClassVar[int] = 1
    rounding: ClassVar[str] = 'nearest'

    def init(self) -> State:
        """The state of a new model."""
        return State(self)

    def begin(self, state: State, loss_scale: float) -> None:
        """Begins an update, whose gradients carry this factor."""
        state.nonfinite = []
        state.updates += 1
        if loss_scale != state.loss_scale:
            self._rescale_state(state, loss_scale)
            state.loss_scale = loss_scale

    def settle(self, state: State) -> None:
        """Learns from the means that were decoded, if the codec learns."""
        state.take_largest()

    def _rescale_state(self, state: State, loss_scale: float) -> None:
        """Rescales what was learnt from gradients to another loss scale."""
        state.multiply_residuals(loss_scale / state.loss_scale)

    def propose(self, state: State, tensors: Tensors
                ) -> numpy.ndarray | None:
        """Finds what :meth:`step` needs the largest of, over all ranks.

        Returns:
            This rank's values, a float32 host array; None, on all ranks, if
            the codec needs nothing.
        """
        return None

    @abc.abstractmethod
    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> None:
        """Says how tensors are encoded in the update that has begun.

        It calls :meth:`.Tensors.code`.

        Args:
            state: Of their model.
            tensors: Flat float32 arrays, C-contiguous, NumPy's or CuPy's.
            largest: The maximum of what all ranks proposed.
            prescale: Factor of gradients when they are encoded.

        Raises:
            ValueError: Compiled code cannot read an array.
        """

    def relay(self, sizes: Sequence[int]) -> Tensors:
        """Tensors on a rank without a model, ready for their means.

        It has no parameters to turn a ratio back into a gradient: it sums
        wires, and encodes means in the wire's own units.  What that leaves
        out is given up.

        Args:
            sizes: Of the tensors, in elements.
        """
        # Values that take no memory.
        nothing = [numpy.broadcast_to(numpy.float32(0), size)
                   for size in sizes]
        tensors = Tensors(map(str, range(len(sizes))), nothing, nothing,
                          grain=self.grain)
        tensors.code(self.init(), self.relays_as,
                     rounding=ROUNDINGS.index(self.rounding), relays=True)
        return tensors


# By name: the number in compiled code, and the dtype of a wire; NumPy has no
# bfloat16, which is the upper half of a float32.
_CASTS: dict[str, tuple[int, numpy.dtype[Any]]] = {
          'float32': (FLOAT32, numpy.dtype('float32')),
          'float16': (FLOAT16, numpy.dtype('float16')),
          'bfloat16': (BFLOAT16, numpy.dtype('uint16'))}


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Sends every gradient as a number of a dtype.

    ``float16`` overflows to infinity above 65504, which is reported like an
    infinite gradient; scale the loss, or use ``bfloat16`` or ``fp8``.

    Attributes:
        name: ``'float32'``, ``'float16'`` or ``'bfloat16'``.
    """

    name: str

    error_feedback = False

    @functools.cached_property
    def wire_dtype(self) -> numpy.dtype:
        """A number of that name."""
        return _CASTS[self.name][1]

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> None:
        tensors.code(state, self.relays_as, prescale=prescale)

    @property
    def relays_as(self) -> int:
        """As of gradients."""
        return _CASTS[self.name][0]


@dataclasses.dataclass(frozen=True)
class BlockScaled(Codec):
    """int4: records of 32 elements on the wire.

    Values are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.Options`.

    Attributes:
        error_feedback: Whether residuals are carried to the next update.
        ranks: How many gradients a mean is of.
    """

    error_feedback: bool = True
    ranks: int = 1

    name, relays_as = 'int4', RECORDS
    grain: ClassVar[int] = RECORD
    wire_dtype = numpy.dtype(f'V{RECORD_BYTES}')

    # State.numbers, by tensor: 'power'.  Gradients are divided by 2^power, so
    # that the scales of their records, which reach from 2^-49 to 24576, have
    # room on both sides.  All ranks see in the mean when that is no longer so.
    # Meanwhile, for one update, what is too large is clipped.

    def settle(self, state: State) -> None:
        powers = state.numbers.setdefault('power', {})
        for name, largest in state.take_largest().items():
            # A rank whose record is clipped adds so much to the mean's scale.
            if not 2.0 ** -40 <= largest < 2.0 ** 13 / self.ranks and (
                    0 < largest < math.inf):
                power = powers.get(name, 0.0)
                # To 2^-10 or, where it may have been clipped, below.
                moved = math.ceil(math.log2(largest)) + (
                    10 if largest < 1 else 24)
                powers[name] = min(max(power + moved, -110.0), 120.0)
                state.multiply_residuals(2.0 ** (power - powers[name]), name)

    def begin(self, state: State, loss_scale: float) -> None:
        self.settle(state)
        super().begin(state, loss_scale)

    def _rescale_state(self, state: State, loss_scale: float) -> None:
        state.multiply_residuals(
            _over_unit(loss_scale) / _over_unit(state.loss_scale))

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> None:
        powers = state.numbers.get('power', {})
        units = [_unit(state.loss_scale) * 2.0 ** powers.get(name, 0.0)
                 for name in tensors.names]
        tensors.code(state, RECORDS, scales=[
            (prescale / unit, 0.0, unit, 0.0, 0.0) for unit in units])


def _unit(loss_scale: float) -> float:
    """A power of two near it, by which gradients are divided.

    Scales of records reach from 2^-49 to 2^14, wherever a loss scale puts
    gradients.
    """
    return 2.0 ** round(math.log2(loss_scale))


def _over_unit(loss_scale: float) -> float:
    """A number on the wire is the unscaled gradient times this."""
    return loss_scale / _unit(loss_scale)
