"""q of a tensor: a quantile of its ratios (lines 10 to 13 of Algorithm 1)."""
from __future__ import annotations

from typing import Any

import numpy

from .staging import to_host
from .tensors import array_module


def sampled_quantile(gradient: Any, parameter: Any, *, quantile: float,
                     samples: int, epsilon: float, seed: tuple[int, ...]
                     ) -> float:
    """A quantile of |D| = |g| / (|w| + epsilon); 0 if there are only zeros.

    Args:
        gradient: Flat float32 array.
        parameter: As large.
        quantile: Which one (Q).
        samples: Elements it is estimated from, at most (R).
        epsilon: As above.
        seed: Of the sampling; non-negative integers.
    """
    def q_of(chosen: Any) -> float:
        return _quantile(gradient[chosen], parameter[chosen], quantile,
                         epsilon)
    if gradient.size <= samples:
        return q_of(slice(None))
    generator = numpy.random.default_rng(seed)
    q = q_of(generator.integers(gradient.size, size=samples))
    if q == 0.0 and bool(gradient.any()):
        # So sparse that the sample missed it: look where it is not zero.
        places = array_module(gradient).flatnonzero(gradient)
        q = q_of(places[generator.integers(places.size, size=samples)])
    return q


def limited(q: float) -> float:
    """Near q, but neither 57344 / q nor its inverse leaves float32."""
    return min(max(q, 1e-30), 1e30)


def _quantile(gradient: Any, parameter: Any, quantile: float, epsilon: float
              ) -> float:
    # In float64: a ratio may be larger than float32's largest number.
    ratio = to_host(abs(gradient.astype(numpy.float64)) / (
        abs(parameter.astype(numpy.float64)) + epsilon))
    # NaN and infinity travel and are reported; they set no scale.
    ratio = ratio[numpy.isfinite(ratio)]
    if not ratio.any():
        return 0.0
    q = float(numpy.quantile(ratio, quantile))
    # More zeros than the quantile allows: take it of the others.
    return limited(q or float(numpy.quantile(ratio[ratio > 0], quantile)))
