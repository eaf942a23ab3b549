"""Gradients as fp8 ratios to their parameters (Algorithm 1 of the fp8 paper).

The paper: Oyama, Nomura, Sato, Matsuoka, "Reducing communication in
data-parallel deep learning with low-precision floating-point numbers".  A
gradient g of a parameter w travels as ::

    wire = fp8(g / (|w| + epsilon) * scale),    scale = 57344 / (q * headroom)

where q, one number per tensor, is the Q-quantile of |g| / (|w| + epsilon)
over at most R sampled elements, renewed every N updates (lines 9 to 15).
"""
# Two things go beyond the paper, and both can be switched off:
#
# `headroom`
#     The paper clips whatever lies above q, 5 % of all elements for Q = 0.95.
#     Clipped is worse than rounded: error feedback can never catch up with an
#     element that is clipped at every update.  The room comes from the other
#     end: normal codes then reach down to 1.06e-9 q headroom, and the error of
#     a round trip falls from 0.38 with the paper's 1 to 0.053 from 2^10 to
#     2^14 (measured on gradients of a small network).
#
# `error_feedback`
#     What an encoding loses is added to the next gradient.  Residuals are kept
#     in the gradient's units: parameters and scales change between updates.
#     None is larger than the Q-quantile of |g|, which is found with q: what
#     saturation cuts off an outlier, and most of what rounding does, is given
#     up, or one faulty gradient would be sent again and again, up to for ever.
#     Rounding to nearest never leaves out as much of elements that are less
#     than eight times as large as this quantile.
#
# A rank without a model (relay) encodes the mean of fp8 wires as it is.  The
# residual of an element is what all encodings of its mean have left out, in
# units of the wire: a number r stands for the gradient
# r (|w| + epsilon) / scale.  When a tensor gets another scale, r is multiplied
# so that this stays the same.  It is not when the parameter changes, so that
# what is left out grows and shrinks with |w| until it is made up for.  That is
# one update later for most elements, and an update changes few parameters by
# much.
from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import numpy

from .. import formats
from .codec import Codec, State
from .staging import array_module, to_host
from .tensors import FP8, RELAY, Tensors

# Of a code: all bits set in infinities and NaN only.
_EXPONENT = numpy.uint8(0x7C)


class TensorReport(NamedTuple):
    """Figures of one tensor, see :meth:`Fp8Ratio.report`."""

    q: float            # quantile of the ratio |D| in use, no unit; 0: none
    clipped: int        # elements saturated so far
    encoded: int        # elements encoded so far


@dataclasses.dataclass(frozen=True)
class Fp8Ratio(Codec):
    """fp8 on the wire, scaled per tensor by the ratio to the parameter.

    Values are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.Options`.

    Attributes:
        rounding: ``'nearest'``, ``'truncate'`` (the paper's) or
            ``'stochastic'`` (encodings; sums of wires round to nearest).
        period: Updates from one choice of q to the next (the paper's N), at
            least 1.
        quantile: Which quantile of the ratios q is (the paper's Q), 0 to 1.
        samples: Elements it is estimated from, at most (the paper's R).
        epsilon: Keeps the ratio finite where a parameter is zero; positive.
        headroom: How far above q values may lie before they are clipped, at
            least 1, which is the paper's.
        error_feedback: Whether residuals are carried to the next update.
        seed: Of the sampling and of stochastic rounding, together with
            ``rank``.
        rank: This rank, so that ranks round independently of each other.
    """

    rounding: str = 'nearest'
    period: int = 100
    quantile: float = 0.95
    samples: int = 1024
    epsilon: float = 1e-5
    headroom: float = 4096.0
    error_feedback: bool = True
    seed: int = 0
    rank: int = 0

    name = 'fp8'
    wire_dtype = numpy.dtype('uint8')

    # State.numbers, by tensor: 'q', 'bound' (of residuals), 'age' (updates
    # since q was chosen), 'clipped' and 'encoded'.

    def _rescale_state(self, state: State, loss_scale: float) -> None:
        super()._rescale_state(state, loss_scale)
        factor = loss_scale / state.loss_scale
        for kind in 'q', 'bound':
            values = state.numbers.setdefault(kind, {})
            values.update({name: _limited(value * factor)
                           for name, value in values.items()})

    def propose(self, state: State, tensors: Tensors
                ) -> numpy.ndarray | None:
        due = self._due(state, tensors)
        return numpy.array([
            self._quantiles(state, tensors, index) for index in due],
            numpy.float32).T.flatten() if due else None

    def step(self, state: State, tensors: Tensors,
             largest: numpy.ndarray | None = None, prescale: float = 1.0
             ) -> None:
        ages = state.numbers.setdefault('age', {})
        known = state.numbers.setdefault('q', {})
        bounds = state.numbers.setdefault('bound', {})
        if largest is not None:
            for index, q, bound in zip(
                    self._due(state, tensors),
                    *largest.reshape(2, -1).tolist(), strict=True):
                name = tensors.names[index]
                ages[name] = 0
                if q > 0:
                    known[name], bounds[name] = _limited(q), _limited(bound)
        scales = []
        for name in tensors.names:
            ages[name] = ages.get(name, 0) + 1
            # Without a q the tensor is zero on all ranks: any scale will do.
            scale = formats.MAX / (
                (known.get(name) or formats.MAX) * self.headroom)
            scales.append((*formats.with_inverse(scale * prescale),
                           *formats.with_inverse(scale),
                           bounds.get(name, math.inf)))
        tensors.code(
            state, FP8, rounding=formats.ROUNDINGS.index(self.rounding),
            epsilon=self.epsilon, scales=scales, seed_of=self._seeds(state))

    def _unit_of(self, state: State, name: str) -> float:
        return state.numbers.get('q', {}).get(name, 0.0) / state.loss_scale

    def _relay(self, state: State, tensors: Tensors, units: dict[str, float],
               rank: int) -> None:
        state.updates += 1
        # q, as the wire has it, is the largest residual: the gradients
        # themselves are not known.
        tensors.code(
            state, RELAY, rounding=formats.ROUNDINGS.index(self.rounding),
            scales=numpy.full((len(units), 5), formats.MAX / self.headroom),
            seed_of=dataclasses.replace(self, rank=rank)._seeds(state),
            units=units, bound=formats.MAX / self.headroom)

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return not ((wire & _EXPONENT) == _EXPONENT).any()

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

    def _due(self, state: State, tensors: Tensors) -> list[int]:
        # A tensor that is not in every update has a period of its own, and
        # one that has shown nothing but zeros has no q yet.  Ages and q are
        # the same on all ranks, so all ranks agree about who is due.
        known, ages = state.numbers.get('q', {}), state.numbers.get('age', {})
        return [index for index, name in enumerate(tensors.names)
                if name not in known or ages[name] >= self.period]

    def _seeds(self, state: State) -> Any:
        """The seed of a tensor at a site; None: nothing is random."""
        if self.rounding != 'stochastic':
            return None
        updates = state.updates

        def seed_of(site: str, name: str) -> int:
            # Encodings that share random bits would err in one direction.
            place = zlib.crc32(f'{site}:0 {name}'.encode())
            return int(numpy.random.SeedSequence(
                (self.seed, self.rank, updates, 0, place)
            ).generate_state(1)[0])
        return seed_of

    def _quantiles(self, state: State, tensors: Tensors, index: int
                   ) -> tuple[float, float]:
        """Q-quantiles of |g| / (|w| + epsilon), and of |g|, of a tensor.

        Lines 10 to 13 of Algorithm 1.  0 if there are only zeros.
        """
        gradient, parameter = (tensors.gradients[index],
                               tensors.parameters[index])

        def of(chosen: Any) -> tuple[float, float]:
            # In float64: a ratio may be larger than float32's largest number.
            size = abs(gradient[chosen].astype(numpy.float64))
            ratio = size / (abs(parameter[chosen].astype(numpy.float64))
                            + self.epsilon)
            return (_quantile(ratio, self.quantile),
                    _quantile(size, self.quantile))
        if gradient.size <= self.samples:
            return of(slice(None))
        generator = numpy.random.default_rng(
            (self.seed, self.rank, state.updates,
             zlib.crc32(tensors.names[index].encode())))
        found = of(generator.integers(gradient.size, size=self.samples))
        if found[0] == 0.0 and bool(gradient.any()):
            # So sparse that the sample missed it: look where it is not zero.
            places = array_module(gradient).flatnonzero(gradient)
            found = of(places[generator.integers(places.size,
                                                 size=self.samples)])
        return found


def _limited(q: float) -> float:
    """Near q, but neither 57344 / q nor its inverse leaves float32."""
    return min(max(q, 1e-30), 1e30)


def _quantile(array: Any, quantile: float) -> float:
    values = to_host(array)
    # NaN and infinity travel and are reported; they set no scale.
    values = values[numpy.isfinite(values)]
    if not values.any():
        return 0.0
    found = float(numpy.quantile(values, quantile))
    # More zeros than the quantile allows: take it of the others.
    return _limited(found or float(numpy.quantile(values[values > 0],
                                                  quantile)))
