"""The all-reduce algorithm that a communicator's options ask for."""
from __future__ import annotations

from mpi4py import MPI

from ..allreduce.aggregator import Aggregated, WorkerComm
from ..allreduce.engine import Engine
from ..allreduce.mpi_op import MpiOp
from ..allreduce.plan import ALGORITHMS, Framing, plan_of
from ..report.stream import EventStream
from .options import Options

_WHOLE = 1 << 60    # bytes of a frame that is a whole vector
_IN_FLIGHT = 3      # frames of a block that are sent and summed at a time

#: The ranks of every node, local rank by local rank.
Nodes = tuple[tuple[int, ...], ...]


def gather_nodes(comm: MPI.Comm, node: int, local: int) -> Nodes:
    """All nodes; each rank gives its node's number, and its own there."""
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
    row, levels = ALGORITHMS[options.algorithm], _two_levels(options, nodes)
    if row.plan is None:
        return MpiOp(comm, events, nodes if levels else None)
    framing = Framing(options.frame_bytes or _WHOLE, _IN_FLIGHT,
                      options.row.sums, options.shared_memory)
    plan = plan_of(row, nodes, levels, vars(options))
    if not row.has_servers:
        return Engine(comm, plan, events, framing)
    if not isinstance(comm, WorkerComm) or comm.everyone is None:
        raise ValueError(
            f'these {comm.size} ranks have no aggregators; '
            f'algorithm={row.name!r} is for create_communicator only')
    return Aggregated(comm, plan, events, framing)


def _two_levels(options: Options, nodes: Nodes) -> bool:
    if not ALGORITHMS[options.algorithm].two_level:
        return False
    sizes = sorted({len(ranks) for ranks in nodes})
    if options.two_level == 'yes' and len(sizes) > 1:
        raise ValueError(
            'two_level needs equally many ranks on every node, not '
            f'{" and ".join(map(str, sizes))}; start the job so, or pass '
            "two_level='no'")
    return options.two_level == 'yes' or (
        options.two_level == 'auto' and len(nodes) > 1 and len(sizes) == 1
        and sizes != [1])
