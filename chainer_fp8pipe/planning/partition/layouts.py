"""Stages times replicas: which of all factorisations of the ranks is best.

A pipeline of all ranks sends activations, replicas send gradients; fewer
stages mean shorter pipelines and more memory for each rank.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...mpi.placement import place
from ...pipeline.schedules.schedule import make_schedule
from ..cores import Cores
from ..schedules.simulator import Link, shared_step
from ..sizes import said_bytes
from .calls import Call, Parameter
from .cuts import CutProblem, DoesNotFit, Wire, chunk_costs
from .intervals import Intervals
from .partition_plan import PartitionPlan, ends_of
from .positions import Order
from .search import search

#: Bytes of an element between replicas, by the codec.
GRADIENT_BYTES = {'fp8': 1.0, 'float16': 2.0, 'float32': 4.0}


@dataclass(frozen=True)
class JobRanks:
    """Where all ranks of a job are, and how fast they exchange bytes.

    Attributes:
        nodes: The node of each rank, as :func:`~.mpi.placement.place` counts.
        cores: How much ranks on the same cores slow each other down.
        exchange: Of a rank while all ranks send and receive at once.
        gradient_bytes: Of an element between replicas.
    """

    nodes: tuple[int, ...]
    cores: Cores
    exchange: Wire
    gradient_bytes: float = 4.0

    @classmethod
    def apart(cls, count: int, wire: Wire, gradient_bytes: float = 4.0
              ) -> JobRanks:
        """Ranks with a node and a core each, none of which slows another."""
        each = tuple(range(count))
        return cls(each, Cores(each), wire, gradient_bytes)


class GridLayout(NamedTuple):
    """A number of stages and replicas, with predicted seconds and bytes.

    Attributes:
        stages: Ranks of a pipeline.
        replicas: Pipelines.
        seconds: Of an update without the optimizer; None: impossible.
        exchange: Seconds of these in which replicas average gradients.
        memory: Bytes of the fullest rank.
        plan: Of a pipeline; None: there is none.
        reason: Why there is no plan.
    """

    stages: int
    replicas: int
    seconds: float | None
    exchange: float = 0.0
    memory: float = 0.0
    plan: PartitionPlan | None = None
    reason: str = ''


def layouts(calls: Sequence[Call], order: Order,
            parameters: Mapping[str, Parameter], task: CutProblem,
            ranks: JobRanks) -> list[GridLayout]:
    """All factorisations of the ranks, the fastest first.

    Args:
        calls: Of a trace with one micro-batch.
        order: Of the model's parameters.
        parameters: By path.
        task: With the micro-batches of a whole batch, which replicas divide
            among themselves, and the memory of a rank.
        ranks: Of the job.
    """
    intervals = Intervals(calls, order, parameters)
    count = len(ranks.nodes)
    found = []
    for stages in range(1, count + 1):
        if count % stages:
            continue
        part = dataclasses.replace(task, stages=stages, micro_batches=max(
            1, -(-task.micro_batches * stages // count)))
        try:
            plan = search(calls, order, parameters, part)
        except (DoesNotFit, ValueError) as error:
            found.append(GridLayout(
                stages, count // stages, None,
                reason=str(error).partition('. What')[0]))
        else:
            found.append(_layout(plan, intervals, parameters, part, ranks))
    return sorted(found, key=lambda one: (
        one.seconds is None, one.seconds or 0.0))


def table(found: Sequence[GridLayout]) -> str:
    """Text with a line per layout; ``found`` has the fastest first."""
    rows = [['stages x replicas', 'update', 'of it exchange', 'memory',
             'against the best']]
    best = found[0].seconds
    for one in found:
        name = f'{one.stages} x {one.replicas}'
        if one.seconds is None:
            rows.append([name, '-', '-', '-', one.reason])
        else:
            assert best is not None
            rows.append([
                name, f'{one.seconds * 1e3:.0f} ms',
                f'{one.exchange * 1e3:.0f} ms', said_bytes(one.memory),
                f'{one.seconds / best:.2f} x' if best else ''])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(
        text.ljust(width) for text, width
        in zip(row, widths, strict=True)).rstrip() for row in rows)


def _layout(plan: PartitionPlan, intervals: Intervals,
            parameters: Mapping[str, Parameter], task: CutProblem,
            ranks: JobRanks) -> GridLayout:
    replicas = len(ranks.nodes) // task.stages
    compute = shared_step(
        make_schedule(task.schedule, task.stages, task.micro_batches,
                      task.chunks),
        chunk_costs(intervals, ends_of(plan.cuts, intervals.starts),
                    plan.recompute, task.defers),
        Link(task.wire.latency, task.wire.bandwidth,
             plan.predicted.crossing),
        place(ranks.nodes, task.stages).ranks, ranks.cores)
    exchange = _exchange(plan, parameters, task, ranks, replicas)
    return GridLayout(task.stages, replicas, compute + exchange, exchange,
                      max(plan.predicted.memory), plan)


def _exchange(plan: PartitionPlan, parameters: Mapping[str, Parameter],
              task: CutProblem, ranks: JobRanks, replicas: int) -> float:
    """Seconds in which replicas average gradients.

    The stage with the most parameters sends as many bytes as an all-reduce
    must send at least.
    """
    numbers = [0.0] * task.stages
    for name, chunk in plan.homes().items():
        parameter = parameters[name]
        if parameter.shape is not None:
            numbers[chunk % task.stages] += (
                parameter.nbytes / parameter.dtype.itemsize)
    return (2 * (replicas - 1) / replicas * max(numbers)
            * ranks.gradient_bytes / ranks.exchange.bandwidth)
