"""q of a tensor: a quantile of its ratios (lines 10 to 13 of Algorithm 1)."""
from __future__ import annotations

from typing import Any

import numpy

from .staging import to_host
from .tensors import array_module


def sampled_quantiles(gradient: Any, parameter: Any, *, quantile: float,
                      samples: int, epsilon: float, seed: tuple[int, ...]
                      ) -> tuple[float, float]:
    """A quantile of |D| = |g| / (|w| + epsilon), and of |g|.

    0 if there are only zeros.

    Args:
        gradient: Flat float32 array.
        parameter: As large.
        quantile: Which one (Q).
        samples: Elements it is estimated from, at most (R).
        epsilon: As above.
        seed: Of the sampling; non-negative integers.
    """
    def of(chosen: Any) -> tuple[float, float]:
        # In float64: a ratio may be larger than float32's largest number.
        size = abs(gradient[chosen].astype(numpy.float64))
        ratio = size / (abs(parameter[chosen].astype(numpy.float64))
                        + epsilon)
        return _quantile(ratio, quantile), _quantile(size, quantile)
    if gradient.size <= samples:
        return of(slice(None))
    generator = numpy.random.default_rng(seed)
    found = of(generator.integers(gradient.size, size=samples))
    if found[0] == 0.0 and bool(gradient.any()):
        # So sparse that the sample missed it: look where it is not zero.
        places = array_module(gradient).flatnonzero(gradient)
        found = of(places[generator.integers(places.size, size=samples)])
    return found


def limited(q: float) -> float:
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
    return limited(found or float(numpy.quantile(values[values > 0],
                                                 quantile)))
