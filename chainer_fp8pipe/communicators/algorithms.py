"""The all-reduce algorithm that a communicator's options ask for."""
from __future__ import annotations

import dataclasses
import sys

from mpi4py import MPI

from ..allreduce.aggregated import Aggregated, WorkerComm
from ..allreduce.algorithm import Algorithm
from ..allreduce.executor import Framing, PlanExecutor
from ..allreduce.mpi_op import MpiOp, TwoLevel
from ..allreduce.plan import (
    LEVELS,
    Plan,
    aggregator,
    torus2d,
    two_level,
)
from ..mpi.shapes import torus_shape
from ..report.statistics import Statistics
from .options import ExchangeOptions, Fp8Options

# Frames of this many bytes are whole vectors.
_WHOLE = 1 << 60


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Which rank is on which node, as ChainerMN counts.

    Attributes:
        ranks: The ranks of every node, local rank by local rank.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, comm: MPI.Comm, node: int, local: int) -> Nodes:
        """Asks all ranks; each gives its node's number and its own there."""
        found: dict[int, dict[int, int]] = {}
        for rank, (its_node, its_local) in enumerate(
                comm.allgather((node, local))):
            found.setdefault(its_node, {})[its_local] = rank
        return cls(tuple(
            tuple(rank for _, rank in sorted(found[its_node].items()))
            for its_node in sorted(found)))

    @property
    def sizes(self) -> set[int]:
        """How many ranks there are on a node."""
        return {len(ranks) for ranks in self.ranks}


def make_algorithm(comm: MPI.Comm, options: ExchangeOptions, fp8: bool,
                   nodes: Nodes, statistics: Statistics) -> Algorithm:
    """The algorithm for these ranks.

    Raises:
        ValueError: The options do not fit the ranks; on all ranks.
    """
    if options.algorithm == 'mpi_op':
        return _mpi_op(comm, options, nodes, statistics)
    if options.algorithm == 'aggregator':
        return _aggregated(comm, options, fp8, nodes, statistics)
    return PlanExecutor(comm, _plans(comm, options, nodes), statistics,
                        framing(options, fp8))


def framing(options: ExchangeOptions, fp8: bool) -> Framing:
    """How vectors are cut and summed, with ``'auto'`` resolved."""
    form = options.partial_sums
    if form == 'auto':
        form = 'float16' if fp8 else 'float32'
    return Framing(options.frame_bytes or _WHOLE, options.frames_in_flight,
                   form)


def _plans(comm: MPI.Comm, options: ExchangeOptions, nodes: Nodes
           ) -> tuple[Plan, ...]:
    if options.algorithm == 'torus2d':
        return _torus(comm, options, nodes)
    level = LEVELS[options.algorithm]
    if _two_levels(options, nodes):
        return (two_level(options.inside, level(len(nodes.ranks)),
                          nodes.ranks),)
    return (level(comm.size),)


def _torus(comm: MPI.Comm, options: ExchangeOptions, nodes: Nodes
           ) -> tuple[Plan, ...]:
    rows, columns = options.shape
    if (rows, columns) == (0, 0):
        per_node = nodes.sizes.pop() if len(nodes.sizes) == 1 else 0
        rows, columns = torus_shape(comm.size, per_node)
    if rows * columns != comm.size:
        raise ValueError(
            f'a torus of shape {rows}x{columns} has {rows * columns} ranks, '
            f'not {comm.size}; pass a shape whose product is the number of '
            'ranks, or none')
    if 1 in (rows, columns):
        if comm.rank == 0 and comm.size > 3:
            print(f'chainer_fp8pipe: {comm.size} ranks make no torus of two '
                  'dimensions; they make a ring', file=sys.stderr)
        return (LEVELS['ring'](comm.size),)
    return torus2d(rows, columns,
                   [rank for node in nodes.ranks for rank in node])


def _aggregated(comm: MPI.Comm, options: ExchangeOptions, fp8: bool,
                nodes: Nodes, statistics: Statistics) -> Aggregated:
    everyone = comm.everyone if isinstance(comm, WorkerComm) else None
    if everyone is None:
        raise ValueError(
            f'these {comm.size} ranks have no aggregators; '
            "algorithm='aggregator' is for create_communicator only")
    if _two_levels(options, nodes):
        plan = two_level(
            options.inside,
            aggregator(len(nodes.ranks), options.aggregators), nodes.ranks)
    else:
        plan = aggregator(comm.size, options.aggregators)
    seed = options.seed if isinstance(options, Fp8Options) else 0
    return Aggregated(everyone, (plan,), statistics, framing(options, fp8),
                      seed)


def _mpi_op(comm: MPI.Comm, options: ExchangeOptions, nodes: Nodes,
            statistics: Statistics) -> Algorithm:
    if not _two_levels(options, nodes):
        return MpiOp(comm, statistics)
    node, local = next(
        (node, ranks.index(comm.rank))
        for node, ranks in enumerate(nodes.ranks) if comm.rank in ranks)
    intra, inter = comm.Split(node, local), comm.Split(local, node)
    try:
        return TwoLevel(MpiOp(intra, statistics), MpiOp(inter, statistics))
    finally:
        intra.Free()
        inter.Free()


def _two_levels(options: ExchangeOptions, nodes: Nodes) -> bool:
    if options.two_level == 'no':
        return False
    if options.two_level == 'yes':
        if len(nodes.sizes) > 1:
            raise ValueError(
                'two_level needs equally many ranks on every node, not '
                f'{" and ".join(map(str, sorted(nodes.sizes)))}; start the '
                "job so, or pass two_level='no'")
        return True
    return len(nodes.sizes) == 1 and len(nodes.ranks) > 1 and (
        nodes.sizes != {1})
