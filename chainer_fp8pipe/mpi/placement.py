"""Which ranks are a pipeline, and the shape of a torus."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def pipelines(nodes: Sequence[int], stages: int) -> list[list[int]]:
    """Divides ranks into pipelines, as many as possible of them inside nodes.

    ``nodes`` are the nodes of all ranks, whose number ``stages`` divides.
    Ranks of a node are neighbours in a pipeline that spans several.
    """
    lines, left = [], []
    ordered = sorted(range(len(nodes)), key=nodes.__getitem__)
    for _, group in itertools.groupby(ordered, nodes.__getitem__):
        ranks = list(group)
        whole = len(ranks) // stages * stages
        lines += _cut(ranks[:whole], stages)
        left += ranks[whole:]
    return sorted(lines + _cut(left, stages))


def _cut(ranks: list[int], length: int) -> list[list[int]]:
    return [ranks[first:first + length]
            for first in range(0, len(ranks), length)]


def torus_shape(ranks: int, per_node: int) -> tuple[int, int]:
    """The default rows and columns of a torus.

    A node is a row where there are several nodes of several ranks; else the
    most nearly square.  (1, ranks), for a prime number, is a ring.
    ``per_node`` is 0 if nodes have not equally many ranks.
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
