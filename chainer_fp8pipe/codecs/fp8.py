"""Gradients as fp8 ratios to their parameters (Algorithm 1 of the fp8 paper).

The paper: Oyama, Nomura, Sato, Matsuoka, "Reducing communication in
data-parallel deep learning with low-precision floating-point numbers".  A
gradient g of a parameter w travels as ::

    wire = fp8(g / (|w| + epsilon) * scale)

with one scale per tensor, renewed every N updates.  :class:`Fp8Ratio` takes
it from the largest ratio, :class:`Fp8Paper` from a quantile, as the paper.
"""
# The paper clips what lies above the 0.95 quantile.  In a tensor most of whose
# elements have hardly a gradient (many classes, words, rows of an embedding)
# that is nearly all of it, and what is clipped at every update no error
# feedback makes up for.
#
# So the scale of Fp8Ratio puts the largest of all elements, on all ranks, at
# 57344 / room.  Codes reach over 3.8e9, so little is lost below: with 4 ranks
# elements keep all their bits down to 6.8e-8 of the largest ratio.
#
# `room` is 16 for each rank of the mean, at least 64.  Gradients may grow by
# it before they are clipped.  All ranks decode the same mean, and see without
# a message what each of them should do: choose again at the next update, if
# the mean's largest code has left a range.  Its upper end is 57344 / (2
# ranks): a rank that clips puts twice as much into the mean, from which the
# others, as they were at the choice, take an eighth at most.  Its lower end is
# a 16th of what the largest alone, of one rank, comes to in the mean.  A
# choice that moves a scale by more than _MOVED, as the first does, is made
# again at the next update: a batch that is an exception, or one wild gradient,
# sets it once at most.
#
# Error feedback: what an encoding loses is added to the next gradient, unless
# it is more than `bound`, the largest |g| when the scale was chosen: what
# saturation cuts off an outlier is given up, or one faulty gradient would be
# sent again and again.
# Residuals are kept in the gradient's units: parameters and scales change
# between updates.
#
# A rank without a model (relay) encodes the mean of fp8 wires as it is.
from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, ClassVar, NamedTuple

import numpy

from .. import formats
from .codec import Codec, State
from .staging import array_module, to_host
from .tensors import FP8, RELAY, Tensors

# A choice that changes a scale by more is made again at the next update.
_MOVED = 8.0


class TensorReport(NamedTuple):
    """Figures of one tensor, see :meth:`Fp8Ratio.report`."""

    q: float            # the ratio |g| / (|w| + epsilon) that sets the scale
    clipped: int        # elements saturated so far
    encoded: int        # elements encoded so far


@dataclasses.dataclass(frozen=True)
class Fp8Ratio(Codec):
    """fp8 on the wire, scaled per tensor by the largest ratio.

    Values are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.Options`.

    Attributes:
        period: Updates from one choice of q to the next (the paper's N), at
            least 1.
        epsilon: Keeps the ratio finite where a parameter is zero; positive.
        error_feedback: Whether residuals are carried to the next update.
        ranks: How many gradients a mean is of.
    """

    period: int = 100
    epsilon: float = 1e-5
    error_feedback: bool = True
    ranks: int = 1

    name, relays_as = 'fp8', RELAY
    wire_dtype = numpy.dtype('uint8')

    # State.numbers, by tensor: 'q', 'bound' (of residuals), 'age' (updates
    # since q was chosen; `period` if it is in doubt), 'clipped', 'encoded'.

    @property
    def room(self) -> float:
        """How far above q values may lie before they are clipped."""
        return 16.0 * max(self.ranks, 4)

    def begin(self, state: State, loss_scale: float) -> None:
        self.settle(state)
        super().begin(state, loss_scale)

    def settle(self, state: State) -> None:
        ages = state.numbers.setdefault('age', {})
        # A mean of zeros only may be of gradients too small for the scale.
        low, high = (formats.MAX / self.room / (16 * self.ranks),
                     formats.MAX / (2 * self.ranks))
        for name, largest in state.take_largest().items():
            if not low <= largest <= high:
                ages[name] = self.period

    def _rescale_state(self, state: State, loss_scale: float) -> None:
        super()._rescale_state(state, loss_scale)
        factor = loss_scale / state.loss_scale
        for kind in 'q', 'bound':
            values = state.numbers.setdefault(kind, {})
            values.update({name: self._limited(value * factor)
                           for name, value in values.items()})

    def propose(self, state: State, tensors: Tensors
                ) -> numpy.ndarray | None:
        due = self._due(state, tensors)
        return numpy.array(self._found(state, tensors, due), numpy.float32
                           ).T.flatten() if due else None

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> None:
        ages = state.numbers.setdefault('age', {})
        known = state.numbers.setdefault('q', {})
        if largest is not None:
            for index, q, bound in zip(
                    self._due(state, tensors),
                    *largest.reshape(2, -1).tolist(), strict=True):
                name = tensors.names[index]
                ages[name] = 0
                if q > 0:
                    self._choose(state, name, self._limited(q), bound)
        ages.update({name: ages.get(name, 0) + 1 for name in tensors.names})
        # Without a q the tensor is zero on all ranks: any scale will do.
        scale = formats.MAX / (numpy.array(
            [known.get(name) or formats.MAX for name in tensors.names])
            * self.room)
        bounds = state.numbers.get('bound', {})
        tensors.code(
            state, FP8, rounding=formats.ROUNDINGS.index(self.rounding),
            epsilon=self.epsilon, scales=numpy.transpose([
                *formats.with_inverse(scale * prescale),
                *formats.with_inverse(scale),
                [bounds.get(name, math.inf) for name in tensors.names]]))

    def report(self, state: State) -> dict[str, TensorReport]:
        """Per tensor: q and the counts of clipped and encoded elements.

        The counts are this rank's own, and grow from the first fp8 update.
        Both encodings can clip, so a tensor's second one adds to ``clipped``
        on the ranks that made it.
        """
        return {name: TensorReport(
            state.numbers.get('q', {}).get(name, 0.0),
            int(state.numbers['clipped'][name]), int(encoded))
            for name, encoded in state.numbers.get('encoded', {}).items()}

    # --- details -----------------------------------------------------------

    def _limited(self, q: float) -> float:
        """Near q, but no scale, nor what it decodes to, leaves float32."""
        return min(max(q, 1e-30), 1e38 / self.room)

    def _due(self, state: State, tensors: Tensors) -> list[int]:
        # A tensor that is not in every update has a period of its own, and
        # one that has shown nothing but zeros has no q yet.  Ages and q are
        # the same on all ranks, so all ranks agree about who is due.
        known, ages = state.numbers.get('q', {}), state.numbers.get('age', {})
        return [index for index, name in enumerate(tensors.names)
                if name not in known or ages[name] >= self.period]

    def _choose(self, state: State, name: str, q: float, bound: float
                ) -> None:
        known = state.numbers.setdefault('q', {})
        bounds = state.numbers.setdefault('bound', {})
        if not known.get(name, 0.0) / _MOVED <= q <= (
                known.get(name, 0.0) * _MOVED):
            state.numbers['age'][name] = self.period
        if bound < bounds.get(name, 0.0):
            state.limit_residuals(name, bound)
        known[name], bounds[name] = q, bound

    def _found(self, state: State, tensors: Tensors, due: list[int]
               ) -> list[tuple[float, float]]:
        """q and the bound that this rank's gradients ask for."""
        return tensors.largest(due, self.epsilon)


@dataclasses.dataclass(frozen=True)
class Fp8Paper(Fp8Ratio):
    """As in the paper: q is a quantile, and what lies above it is clipped.

    Attributes:
        quantile: Which quantile of the ratios q is (the paper's Q), 0 to 1.
        samples: Elements it is estimated from, at most (the paper's R).
        seed: Of the sampling, together with ``rank``.
        rank: This rank.
    """

    quantile: float = 0.95
    samples: int = 1024
    seed: int = 0
    rank: int = 0
    error_feedback: bool = dataclasses.field(default=False, init=False)

    name = 'fp8_paper'
    rounding: ClassVar[str] = 'truncate'

    @property
    def room(self) -> float:
        """None: what lies above the quantile is clipped."""
        return 1.0

    def settle(self, state: State) -> None:
        state.take_largest()

    def _limited(self, q: float) -> float:
        return min(max(q, 1e-30), 1e30)

    def _choose(self, state: State, name: str, q: float, bound: float
                ) -> None:
        state.numbers.setdefault('q', {})[name] = q

    def _found(self, state: State, tensors: Tensors, due: list[int]
               ) -> list[tuple[float, float]]:
        return [(self._quantile(state, tensors, index), 0.0) for index in due]

    def _quantile(self, state: State, tensors: Tensors, index: int) -> float:
        """Of |g| / (|w| + epsilon): lines 10 to 13 of Algorithm 1.

        0 if there are only zeros.
        """
        gradient, parameter = (tensors.gradients[index],
                               tensors.parameters[index])

        def of(chosen: Any) -> float:
            # In float64: a ratio may be larger than float32's largest number.
            size = abs(gradient[chosen].astype(numpy.float64))
            q = _quantile(size / (abs(parameter[chosen].astype(
                numpy.float64)) + self.epsilon), self.quantile)
            return q and self._limited(q)
        if gradient.size <= self.samples:
            return of(slice(None))
        generator = numpy.random.default_rng(
            (self.seed, self.rank, state.updates,
             zlib.crc32(tensors.names[index].encode())))
        found = of(generator.integers(gradient.size, size=self.samples))
        if found == 0.0 and bool(gradient.any()):
            # So sparse that the sample missed it: look where it is not zero.
            places = array_module(gradient).flatnonzero(gradient)
            found = of(places[generator.integers(places.size,
                                                 size=self.samples)])
        return found


def _quantile(array: Any, quantile: float) -> float:
    values = to_host(array)
    # NaN and infinity travel and are reported; they set no scale.
    values = values[numpy.isfinite(values)]
    if not values.any():
        return 0.0
    found = float(numpy.quantile(values, quantile))
    # More zeros than the quantile allows: take it of the others.
    return found or float(numpy.quantile(values[values > 0], quantile))
