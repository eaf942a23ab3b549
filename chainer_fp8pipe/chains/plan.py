"""A plan: where a model is cut, as data that can be saved and edited."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..report import stored
from ..report.quantities import columns, counted, size
from .calls import Order, Position, Value


@dataclass(frozen=True)
class Predicted:
    """Predicted seconds and bytes of a plan.

    Attributes:
        busy: Seconds in which each chunk computes, per micro-batch.
        memory: Bytes that each rank needs at most, beyond the
            interpreter's.
        crossing: Bytes that go from each chunk but the last to the next
            one, per micro-batch.
    """

    busy: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    crossing: tuple[float, ...] = ()


@dataclass(frozen=True)
class Cut:
    """Where a chunk begins, as people can read and edit it.

    Attributes:
        before: The path of a parameter, of whose group the first use counts.
        calls_later: So many calls after that.
    """

    before: str
    calls_later: int = 0

    @classmethod
    def at(cls, order: Order, position: Position) -> Cut:
        """The cut at a position."""
        return cls(order[position.place][0], position.depth)


@dataclass(frozen=True)
class PartitionPlan:
    """Where a model is cut.

    Attributes:
        order: The model's parameters in groups, in the order of first use.
        cuts: Where each chunk but the first one begins.
        stages: Ranks of the pipeline; chunk c is on rank c % stages.
        recompute: For each chunk, whether it keeps its inputs only and runs
            forward twice.
        micro_batches: Number of micro-batches that the plan was made for.
        schedule: Name of the schedule that the plan was made for.
        predicted: Seconds and bytes of the plan.

    Raises:
        ValueError: The parts contradict each other.
    """

    order: Order
    cuts: tuple[Cut, ...]
    stages: int
    recompute: tuple[bool, ...]
    micro_batches: int
    schedule: str
    predicted: Predicted = Predicted()

    def __post_init__(self) -> None:
        chunks = len(self.cuts) + 1
        if not all(self.order):
            raise ValueError('the order of parameters has an empty group')
        if any(left >= right for left, right in itertools.pairwise(
                self.positions)):
            raise ValueError('the cuts of a plan must be in the order of '
                             'parameters')
        if self.stages < 1 or chunks % self.stages:
            raise ValueError(f'{chunks} chunks cannot be on {self.stages} '
                             'stages equally')
        if len(self.recompute) != chunks:
            raise ValueError(f'recompute has {len(self.recompute)} entries '
                             f'for {chunks} chunks')

    @functools.cached_property
    def positions(self) -> tuple[Position, ...]:
        """The first position of each chunk but the first one."""
        places = {name: place for place, group in enumerate(self.order)
                  for name in group}
        for cut in self.cuts:
            if cut.before not in places:
                raise ValueError(f'the plan cuts before {cut.before}, which '
                                 'is not in its order of parameters')
        return tuple(Position(places[cut.before], cut.calls_later)
                     for cut in self.cuts)

    @property
    def chunks(self) -> int:
        """Chunks of each rank."""
        return (len(self.cuts) + 1) // self.stages

    def homes(self) -> dict[str, int]:
        """The chunk of each parameter, by the parameter's path."""
        return {name: sum(cut <= (place, 0) for cut in self.positions)
                for place, group in enumerate(self.order) for name in group}

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        stored.save(path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes."""
        return asdict(self)


def table(part: Any, title: str, sizes: Mapping[str, Value]) -> str:
    """A line per chunk: ranks, time, memory, and what is sent on.

    Args:
        part: The ``partition`` of a model that
            :func:`~chainer_fp8pipe.partition` has cut.
        title: The name of the model's class.
        sizes: Of its parameters, by path.
    """
    plan, predicted, replicas = (part.plan, part.plan.predicted,
                                 part.grid.replicas)
    busy, total = predicted.busy, sum(predicted.busy) or 1.0
    head = (f'{title}: ' + counted(plan.stages, 'stage')
            + f' x {replicas} replicas' * (replicas > 1)
            + f', {plan.schedule} with '
            + counted(plan.micro_batches, 'micro-batch')
            + ''.join(f', balance {total / len(busy) / slowest:.2f}'
                      for slowest in {max(busy, default=0)} - {0}))
    begins = [plan.order[0][0] if plan.order else '',
              *(cut.before for cut in plan.cuts)]
    rows = [['stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
             'first parameter']]
    for chunk, again in enumerate(plan.recompute):
        stage = chunk % plan.stages
        rows.append([
            f'{stage}.{chunk // plan.stages}' if plan.chunks > 1
            else str(stage),
            ' '.join(map(str, part.grid.ranks[stage])),
            ''.join(f'{100 * one / total:.0f} %'
                    for one in busy[chunk:chunk + 1]),
            size(sum(sizes[name].nbytes
                     for name in part.placement.used[chunk])),
            ''.join(map(size, predicted.memory[stage:stage + 1])),
            ''.join(map(size, predicted.crossing[chunk:chunk + 1])),
            begins[chunk] + ' (again)' * again])
    notes = ['(again): keeps its inputs only, and runs forward twice'] * any(
        plan.recompute)
    return '\n'.join([
        head, *columns(rows), *notes,
        *(f'{name} is on stages {" and ".join(map(str, ranks))}, which sum '
          'its gradient' for name, ranks in part.placement.ties.items()),
        *part.recorder.undivided()])


def load_plan(source: str | Mapping[str, Any] | PartitionPlan
              ) -> PartitionPlan:
    """Reads a plan, and checks that its parts agree with each other.

    Args:
        source: The path of a file that :meth:`PartitionPlan.save` has written,
            its content, or a plan, which is returned as it is.

    Raises:
        ValueError: Why the source is no plan that can be carried out.
    """
    return stored.load(PartitionPlan, source)
