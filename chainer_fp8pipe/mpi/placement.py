"""Which rank is which stage of which replica, and the shape of a torus.

The ranks of one pipeline hold one replica of the model; the replicas of one
stage average its gradients.  What the ranks of a node have in common decides
what crosses the slow network between nodes.  RaNNC (section 5.3.1 of its
report) keeps each pipeline inside a node as far as possible; so does this,
unless less is sent the other way.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..report.quantities import columns

AXES = 'pipeline', 'data'


class Placement(NamedTuple):
    """Where the ranks of a job are on the grid of stages and replicas.

    Attributes:
        ranks: ``ranks[stage][replica]`` is the rank there.
        nodes: ``nodes[rank]`` is the number of that rank's node.
    """

    ranks: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]

    @property
    def pipeline_crossings(self) -> int:
        """Boundaries between stages on two nodes, over all pipelines."""
        return sum(self.nodes[rank] != self.nodes[following]
                   for pipeline in zip(*self.ranks, strict=True)
                   for rank, following in pairwise(pipeline))

    @property
    def data_crossings(self) -> int:
        """Nodes that a stage's replicas are on, less one, over all stages."""
        return sum(len({self.nodes[rank] for rank in stage}) - 1
                   for stage in self.ranks)

    def table(self) -> list[str]:
        """Lines of text: stages by replicas, or the other way if narrower.

        Each cell is ``rank@node``.
        """
        cells = [[f'{rank}@{self.nodes[rank]}' for rank in stage]
                 for stage in self.ranks]
        down, across = 'stage', 'replica'
        if len(cells[0]) > len(cells):
            cells = [list(column) for column in zip(*cells, strict=True)]
            down, across = across, down
        rows = [[f'{down} \\ {across}', *map(str, range(len(cells[0])))],
                *([str(number), *row] for number, row in enumerate(cells))]
        return columns(rows, right=True)


def place(nodes: Sequence[int], stages: int, inside: str = 'auto'
          ) -> Placement:
    """Chooses each rank's stage and replica.

    ``nodes`` are the nodes of all ranks, whose number ``stages`` divides;
    ``inside`` is as for :class:`.ProcessGrid`.
    """
    if inside != 'auto':
        return _place(nodes, stages, inside)
    pipeline, data = (_place(nodes, stages, axis) for axis in AXES)
    return (data if pipeline.pipeline_crossings and not data.data_crossings
            else pipeline)


def _place(nodes: Sequence[int], stages: int, inside: str) -> Placement:
    lines = _lines(nodes, stages if inside == 'pipeline'
                   else len(nodes) // stages)
    ranks = zip(*lines, strict=True) if inside == 'pipeline' else lines
    return Placement(tuple(map(tuple, ranks)), tuple(nodes))


def _lines(nodes: Sequence[int], length: int) -> list[list[int]]:
    """Divides the ranks into lines of so many that span few nodes.

    Whole lines inside nodes first.  What is then left over on uneven nodes
    is joined: the largest rest, completed by one that fits exactly or by the
    next largest.  Ranks of a node stay neighbours in a line.
    """
    free = {node: [rank for rank, of in enumerate(nodes) if of == node]
            for node in sorted(set(nodes))}
    lines = []
    while any(free.values()):
        line: list[int] = []
        while len(line) < length:
            need = length - len(line)
            ranks = next((ranks for ranks in free.values() if line
                          and len(ranks) == need),
                         max(free.values(), key=len))
            line += ranks[:need]
            del ranks[:need]
        lines.append(sorted(line, key=lambda rank: (nodes[rank], rank)))
    return sorted(lines)


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
