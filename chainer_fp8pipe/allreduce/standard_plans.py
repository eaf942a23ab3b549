"""Which plans an algorithm's name means on a given cluster."""
from __future__ import annotations

from collections.abc import Sequence

from .plan import Plan, compose, direct, ring, torus2d

#: Algorithms that can be one level of two.
LEVELS = {'direct': direct, 'ring': ring}


def one_level(algorithm: str, ranks: int) -> tuple[Plan, ...]:
    """Plans of ``'direct'`` or ``'ring'`` among ``ranks`` ranks."""
    return (LEVELS[algorithm](ranks),)


def two_level(inside: str, between: str, nodes: Sequence[Sequence[int]]
              ) -> tuple[Plan, ...]:
    """``inside`` each node, then ``between`` them.

    Args:
        inside: One of :data:`LEVELS`.
        between: One of :data:`LEVELS`.
        nodes: The ranks of every node; equally many.
    """
    inner = LEVELS[inside](len(nodes[0]))
    outer = LEVELS[between](len(nodes))
    return (compose(inner, outer, lambda member, node: nodes[node][member],
                    encode_between=True),)


def torus(shape: tuple[int, int], nodes: Sequence[Sequence[int]]
          ) -> tuple[Plan, ...]:
    """A 2D torus of ``shape``, ranks in the order of nodes."""
    order = [rank for node in nodes for rank in node]
    rows, columns = shape
    return torus2d(rows, columns,
                   lambda row, column: order[row * columns + column])
