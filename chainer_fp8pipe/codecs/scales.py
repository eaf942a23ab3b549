"""q of every tensor: a quantile of its ratios (lines 10 to 13 of Algorithm 1).
"""
from __future__ import annotations

import zlib
from typing import Any

import numpy

from .staging import to_host
from .tensors import Tensors

# q is kept where neither 57344 / q nor its inverse leaves float32.
_SMALLEST_Q = 1e-30
_LARGEST_Q = 1e30


class Scales:
    """Chooses q for each tensor, from time to time, the same on all ranks.

    Args:
        period: Updates of a tensor from one choice to the next (N).
        quantile: Which quantile of |D| = |g| / (|w| + epsilon) q is (Q).
        samples: Elements it is estimated from, at most (R).
        epsilon: As above.
        seed: Of the sampling; any non-negative integers.
    """

    def __init__(self, period: int, quantile: float, samples: int,
                 epsilon: float, seed: tuple[int, ...]) -> None:
        self._period = period
        self._quantile = quantile
        self._samples = samples
        self._epsilon = epsilon
        self._seed = seed
        self.q: dict[str, float] = {}       # of |D|, no unit
        self.age: dict[str, int] = {}       # updates since q was chosen

    def propose(self, tensors: Tensors, update: int) -> numpy.ndarray | None:
        """This rank's q of the tensors that are due, float32.

        Args:
            tensors: Some of the tensors of this update.
            update: Number of the update, for the seed of the sampling.

        Returns:
            One q per tensor that is due; None if there is none.
        """
        due = self._due(tensors)
        if not due:
            return None
        return numpy.array([self._sample(tensors, index, update)
                            for index in due], numpy.float32)

    def settle(self, tensors: Tensors, largest: numpy.ndarray | None
               ) -> None:
        """Takes the largest q of all ranks; call it at every update."""
        if largest is not None:
            for index, q in zip(self._due(tensors), largest.tolist(),
                                strict=True):
                name = tensors.names[index]
                self.age[name] = 0
                if q > 0:
                    self.q[name] = _limited(q)
        for name in tensors.names:
            self.age[name] += 1

    def multiply(self, factor: float) -> None:
        """All gradients have grown by a factor: the loss scale changed."""
        for name, q in self.q.items():
            self.q[name] = _limited(q * factor)

    def _due(self, tensors: Tensors) -> list[int]:
        # A tensor that is not in every update has a period of its own, and
        # one that has shown nothing but zeros has no q yet.  Ages and q are
        # the same on all ranks, so all ranks agree about who is due.
        return [index for index, name in enumerate(tensors.names)
                if name not in self.q or self.age[name] >= self._period]

    def _sample(self, tensors: Tensors, index: int, update: int) -> float:
        """This rank's quantile of |D| of one tensor; 0 if all is zero."""
        gradient = tensors.gradients[index]
        parameter = tensors.parameters[index]
        if gradient.size <= self._samples:
            return self._quantile_of(gradient, parameter)
        generator = numpy.random.default_rng((
            *self._seed, update, zlib.crc32(tensors.names[index].encode())))
        chosen = generator.integers(gradient.size, size=self._samples)
        q = self._quantile_of(gradient[chosen], parameter[chosen])
        if q == 0.0 and bool(gradient.any()):
            # So sparse that the sample missed it: look where it is not zero.
            places = tensors.xp.flatnonzero(gradient)
            chosen = places[generator.integers(places.size,
                                               size=self._samples)]
            q = self._quantile_of(gradient[chosen], parameter[chosen])
        return q

    def _quantile_of(self, gradient: Any, parameter: Any) -> float:
        # In float64: a ratio may be larger than float32's largest number.
        ratio = to_host(abs(gradient.astype(numpy.float64)) / (
            abs(parameter.astype(numpy.float64)) + self._epsilon))
        # NaN and infinity travel and are reported; they set no scale.
        ratio = ratio[numpy.isfinite(ratio)]
        if not ratio.any():
            return 0.0
        q = float(numpy.quantile(ratio, self._quantile))
        # More zeros than the quantile allows: take it of the others.
        q = q or float(numpy.quantile(ratio[ratio > 0], self._quantile))
        return _limited(q)


def _limited(q: float) -> float:
    return min(max(q, _SMALLEST_Q), _LARGEST_Q)
