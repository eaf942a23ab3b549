"""Rows and columns of a number of ranks."""
from __future__ import annotations

import math


def torus_shape(ranks: int, per_node: int) -> tuple[int, int]:
    """The default rows and columns of a torus.

    A node is a row where there are several nodes of several ranks; else the
    most nearly square.  (1, ranks), for a prime number, is a ring.

    Args:
        ranks: How many there are.
        per_node: How many each node has; 0 if they are not equally many.
    """
    if 1 < per_node < ranks and ranks % per_node == 0:
        return ranks // per_node, per_node
    rows = max(divisor for divisor in range(1, math.isqrt(ranks) + 1)
               if ranks % divisor == 0)
    return rows, ranks // rows


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    return [divisor for divisor in range(1, number + 1)
            if number % divisor == 0]
