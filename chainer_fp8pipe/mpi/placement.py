"""Into what a number of ranks can be divided."""
from __future__ import annotations

import math


def torus_shape(ranks: int, per_node: int) -> tuple[int, int]:
    """Rows and columns: a row per node of several ranks, or nearly square.

    (1, ranks) is a ring.  ``per_node`` is 0 if nodes differ.
    """
    if 1 < per_node < ranks and ranks % per_node == 0:
        return ranks // per_node, per_node
    rows = max(number for number in divisors(ranks)
               if number <= math.isqrt(ranks))
    return rows, ranks // rows


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    return [divisor for divisor in range(1, number + 1)
            if number % divisor == 0]
