"""The all-reduce algorithm that a communicator's options ask for."""
from __future__ import annotations

import sys

from mpi4py import MPI

from ..allreduce.aggregator import Aggregated, WorkerComm
from ..allreduce.engine import Engine
from ..allreduce.mpi_op import MpiOp
from ..allreduce.plan import (
    LEVELS,
    Framing,
    Plan,
    aggregator,
    torus2d,
    two_level,
)
from ..mpi.placement import torus_shape
from ..mpi.ranks import cores_each
from ..report.stream import EventStream
from .options import Options

# Frames of this many bytes are whole vectors.
_WHOLE = 1 << 60
# Frames of a block that are under way at a time: those that are sent, summed
# and received.
_IN_FLIGHT = 3
# Threads of a rank, if no number is given: more wait for memory.
_MOST_THREADS = 4


#: The ranks of every node, local rank by local rank.
Nodes = tuple[tuple[int, ...], ...]


def gather_nodes(comm: MPI.Comm, node: int, local: int) -> Nodes:
    """Gathers the ranks of all nodes.

    Each rank gives the number of its node, and its own number there.
    """
    found: dict[int, list[int]] = {}
    places = comm.allgather((node, local))
    for rank in sorted(range(comm.size), key=places.__getitem__):
        found.setdefault(places[rank][0], []).append(rank)
    return tuple(map(tuple, found.values()))


def make_algorithm(comm: MPI.Comm, options: Options, nodes: Nodes,
                   events: EventStream) -> Engine:
    """The algorithm for these ranks.

    Raises:
        ValueError: The options do not fit the ranks; on all ranks.
    """
    if options.algorithm == 'mpi_op':
        return MpiOp(comm, events,
                     nodes if _two_levels(options, nodes) else None)
    form = options.partial_sums
    if form == 'auto':
        form = 'float16' if options.name.startswith('fp8') else 'float32'
    framing = Framing(options.frame_bytes or _WHOLE,
                      _IN_FLIGHT, form, options.shared_memory,
                      options.threads or min(cores_each(comm), _MOST_THREADS))
    if options.algorithm == 'torus2d':
        return Engine(comm, _torus(comm, options, nodes), events, framing)
    levels = _two_levels(options, nodes)
    members = len(nodes) if levels else comm.size
    plan = (aggregator(members, options.aggregators)
            if options.algorithm == 'aggregator'
            else LEVELS[options.algorithm](members))
    if levels:
        plan = two_level('direct', plan, nodes)
    if options.algorithm != 'aggregator':
        return Engine(comm, (plan,), events, framing)
    if not isinstance(comm, WorkerComm) or comm.everyone is None:
        raise ValueError(
            f'these {comm.size} ranks have no aggregators; '
            "algorithm='aggregator' is for create_communicator only")
    return Aggregated(comm, (plan,), events, framing)


def _torus(comm: MPI.Comm, options: Options, nodes: Nodes
           ) -> tuple[Plan, ...]:
    rows, columns = options.shape
    if (rows, columns) == (0, 0):
        sizes = _sizes(nodes)
        rows, columns = torus_shape(comm.size,
                                    sizes[0] if len(sizes) == 1 else 0)
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
                   [rank for node in nodes for rank in node])


def _two_levels(options: Options, nodes: Nodes) -> bool:
    sizes = _sizes(nodes)
    if options.two_level == 'yes' and len(sizes) > 1:
        raise ValueError(
            'two_level needs equally many ranks on every node, not '
            f'{" and ".join(map(str, sizes))}; start the job so, or pass '
            "two_level='no'")
    return options.two_level == 'yes' or (
        options.two_level == 'auto' and len(nodes) > 1 and len(sizes) == 1
        and sizes != [1])


def _sizes(nodes: Nodes) -> list[int]:
    """The numbers of ranks that nodes have, each once, in their order."""
    return sorted({len(ranks) for ranks in nodes})
