"""Where to cut a model: the shortest step under a memory limit.

Dynamic programming over all intervals finds the cut whose slowest stage is
fastest, and among cuts nearly as good those that move less; the simulator of
schedules says which of them has the shortest step.  Where activations do not
fit, a stage keeps its inputs only and runs forward twice.  After Tanaka et
al., "Automatic Graph Partitioning for Very Large-scale Deep Learning" (RaNNC,
IPDPS 2021), section IV, whose operations are joined to blocks first: here
every atom is considered, of up to 1,500.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ...pipeline.schedules.schedule import Kind, Schedule, make_schedule
from ..schedules.simulator import Costs, Link, simulate
from ..sizes import said_bytes
from .intervals import Intervals

#: How much slower than the best a stage may be if less crosses then.
_SLACKS = (0.0, 0.02, 0.05, 0.1)


#: A search asks for the schedule of the same problem again and again, and
#: making it takes as long as simulating it.
_schedule = functools.lru_cache(maxsize=16)(make_schedule)


class DoesNotFit(ValueError):
    """No cut fits into the memory of the ranks."""


@dataclass(frozen=True)
class Wire:
    """How values go from a stage to the next one.

    Attributes:
        latency: Seconds of a message, packing included.
        bandwidth: Bytes per second.
    """

    latency: float = 1e-4
    bandwidth: float = 2e9


@dataclass(frozen=True)
class CutProblem:
    """What a cut has to suit.

    Attributes:
        stages: Ranks of the pipeline.
        micro_batches: Into how many a batch is cut.
        schedule: Name of the schedule.
        chunks: How many each rank has.
        memory: Bytes of a rank beyond the interpreter's; None: no limit.
        copies: Arrays as large as the parameters that a rank keeps: values,
            gradients, the optimizer's state.
        recompute: Whether stages may keep their inputs only: ``'auto'``
            (where memory asks for it), True (all of them) or False.  Those
            that must not run forward twice never do.
        wire: Between stages.
        overhead: Bytes of each rank whatever it computes.
    """

    stages: int
    micro_batches: int
    schedule: str = '1f1b'
    chunks: int = 1
    memory: float | None = None
    copies: float = 5.0
    recompute: str | bool = 'auto'
    wire: Wire = Wire()
    overhead: float = 0.0

    @property
    def parts(self) -> int:
        """Chunks of all ranks."""
        return self.stages * self.chunks

    @property
    def defers(self) -> bool:
        """Whether the schedule puts off the gradients of weights."""
        return self.schedule == 'zero_bubble'

    def steps(self) -> Schedule:
        """The actions of every rank in one step."""
        return _schedule(self.schedule, self.stages, self.micro_batches,
                         self.chunks)

    def live(self) -> list[int]:
        """For each chunk, how many micro-batches are live at a time at most.

        A micro-batch is live from its forward pass to the end of its
        backward pass.
        """
        found = [0] * self.parts
        for actions in self.steps().actions:
            now: dict[int, int] = {}
            for action in actions:
                if action.kind is Kind.FORWARD:
                    now[action.chunk] = now.get(action.chunk, 0) + 1
                    found[action.chunk] = max(found[action.chunk],
                                              now[action.chunk])
                elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    now[action.chunk] -= 1
        return found


@dataclass(frozen=True)
class Cut:
    """A cut, and what is expected of it.

    Attributes:
        ends: Index after the last atom of each chunk.
        recompute: Which chunks keep their inputs only.
        seconds: Of a step, without update.
        busy: Seconds in which each chunk computes, per micro-batch.
        memory: Bytes of each rank at most.
        crossing: Bytes that cross each boundary, per micro-batch.
    """

    ends: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]
    crossing: tuple[float, ...]


def best_cut(intervals: Intervals, task: CutProblem) -> Cut:
    """The cut with the shortest step.

    Raises:
        DoesNotFit: Saying by how much, and what would help.
        ValueError: There are fewer atoms than chunks.
    """
    if intervals.count < task.parts:
        raise ValueError(
            f'the model can be cut into {intervals.count} parts at most, but '
            f'{task.parts} are asked for; use fewer ranks')
    tables = _Tables(intervals, task)
    found = [evaluate(intervals, task, ends) for ends in tables.candidates()]
    if not found:
        raise DoesNotFit(_why(intervals, task))
    return min(found, key=lambda cut: cut.seconds)


def evaluate(intervals: Intervals, task: CutProblem, ends: Sequence[int]
            ) -> Cut:
    """Predicts the step, the memory and the messages of a cut.

    Args:
        intervals: Of the model.
        task: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
    """
    starts = [0, *ends[:-1]]
    live = task.live()
    again, memory = [], [0.0] * task.stages
    for chunk, (start, end) in enumerate(zip(starts, ends, strict=True)):
        plain, short = (_bytes(intervals, task, live[chunk], start, end, way)
                        for way in (False, True))
        repeat = not intervals.once[start, end] and (
            task.recompute is True or (
                task.recompute == 'auto' and task.memory is not None
                and plain > _share(task)))
        again.append(repeat)
        memory[chunk % task.stages] += short if repeat else plain
    costs = chunk_costs(intervals, ends, again, task.defers)
    busy = [sum(cost) for cost in costs]
    crossing = [float(intervals.crossing[end]) for end in ends[:-1]]
    line = simulate(task.steps(), costs, Link(
        task.wire.latency, task.wire.bandwidth, crossing))
    return Cut(tuple(ends), tuple(again), line.step_time, tuple(busy),
               tuple(task.overhead + used for used in memory),
               tuple(crossing))


def chunk_costs(intervals: Intervals, ends: Sequence[int],
                recompute: Sequence[bool], defers: bool) -> list[Costs]:
    """Seconds of each chunk's passes, per micro-batch.

    Args:
        intervals: Of the model.
        ends: Index after the last atom of each chunk.
        recompute: Which chunks run forward twice.
        defers: Whether the gradients of weights are put off.
    """
    costs = []
    for start, end, again in zip([0, *ends[:-1]], ends, recompute,
                                 strict=True):
        forward, backward, weights = (
            float(sums[end] - sums[start]) for sums in (
                intervals.forward, intervals.backward, intervals.weights))
        if not defers:
            weights = 0.0
        costs.append(Costs(forward, backward - weights, weights,
                           forward * again))
    return costs


class _Tables:
    """The dynamic programme: what every interval costs as each chunk."""

    def __init__(self, intervals: Intervals, task: CutProblem) -> None:
        self._intervals, self._task = intervals, task
        count = intervals.count
        edge = (intervals.crossing / task.wire.bandwidth
                + (intervals.values > 0) * task.wire.latency)
        traffic = edge[:, None] + edge[None, :]
        plain = intervals.seconds() + 2 * traffic
        forward = intervals.forward[None, :] - intervals.forward[:, None]
        forward = numpy.where(intervals.once, 0.0, forward)     # not again
        self._traffic = traffic
        empty = numpy.tril(numpy.ones((count + 1, count + 1), bool))
        self._costs = []
        for live in task.live():
            cost = plain + forward if task.recompute is True else plain
            cost = numpy.where(empty, numpy.inf, cost)
            if task.memory is not None:
                cost = self._limited(cost, forward, live)
            self._costs.append(cost)

    def candidates(self) -> list[tuple[int, ...]]:
        """Cuts that may be the best."""
        slowest = self._slowest()
        if not numpy.isfinite(slowest):
            return []
        return list(dict.fromkeys(
            self._least_traffic(slowest * (1 + slack) + 1e-12)
            for slack in _SLACKS))

    def _limited(self, cost: numpy.ndarray, forward: numpy.ndarray,
                 live: int) -> numpy.ndarray:
        """Costs where memory is enough; with recomputation where needed."""
        task, share = self._task, _share(self._task)
        recomputes = task.recompute is True
        needed = _table(self._intervals, task, live, recomputes)
        limited = numpy.where(needed > share, numpy.inf, cost)
        if task.recompute == 'auto':
            short = _table(self._intervals, task, live, True)
            limited = numpy.minimum(limited, numpy.where(
                short > share, numpy.inf, cost + forward))
        return limited

    def _slowest(self) -> float:
        """The least possible time of the slowest chunk."""
        best = self._costs[0][0]
        for cost in self._costs[1:]:
            best = numpy.maximum(best[:, None], cost).min(axis=0)
        return float(best[-1])

    def _least_traffic(self, bound: float) -> tuple[int, ...]:
        """Ends of chunks that are no slower than the bound."""
        allowed = [numpy.where(cost > bound, numpy.inf,
                               self._traffic + cost * 1e-6)
                   for cost in self._costs]
        total, origins = allowed[0][0], []
        for table in allowed[1:]:
            sums = total[:, None] + table
            origins.append(sums.argmin(axis=0))
            total = sums.min(axis=0)
        ends = [self._intervals.count]
        for origin in reversed(origins):
            ends.append(int(origin[ends[-1]]))
        return tuple(reversed(ends))


def _share(task: CutProblem) -> float:
    """Bytes that each chunk of a rank may take."""
    assert task.memory is not None
    return (task.memory - task.overhead) / task.chunks


def _table(intervals: Intervals, task: CutProblem, live: int,
           recomputes: bool) -> numpy.ndarray:
    """Bytes of every interval as a chunk."""
    edges = intervals.crossing[:, None] + intervals.crossing[None, :]
    fixed = (intervals.parameters * task.copies + intervals.temporary
             + 2 * edges)
    inputs = numpy.broadcast_to(intervals.crossing[:, None], edges.shape)
    kept = intervals.kept
    if task.defers:
        kept = kept + intervals.deferred
    if recomputes and not task.defers:
        return fixed + live * inputs + numpy.where(
            intervals.once, live * kept, kept)
    return fixed + live * (inputs + kept)


def _bytes(intervals: Intervals, task: CutProblem, live: int, start: int,
           end: int, recomputes: bool) -> float:
    fixed = (intervals.parameters[start, end] * task.copies
             + intervals.temporary[start, end] + 2 * (
                 intervals.crossing[start] + intervals.crossing[end]))
    inputs, kept = intervals.crossing[start], intervals.kept[start, end]
    if task.defers:
        kept = kept + intervals.deferred[start, end]
    if recomputes and not task.defers and not intervals.once[start, end]:
        return float(fixed + live * inputs + kept)
    return float(fixed + live * (inputs + kept))


def _why(intervals: Intervals, task: CutProblem) -> str:
    """The text of DoesNotFit: the bytes that are missing, and remedies."""
    assert task.memory is not None
    needed = least_memory(intervals, task)
    said = (f'no cut into {task.stages} stages fits into '
            f'{said_bytes(task.memory)} per rank; the best needs '
            f'{said_bytes(needed, up=True)}, '
            f'{said_bytes(needed - task.memory, up=True)} more')
    helps = []
    for name, other in _ways(task):
        least = least_memory(intervals, other)
        if least <= task.memory:
            helps.append(f'{name} ({said_bytes(least, up=True)})')
    helps.append('smaller micro-batches')
    return f'{said}. What would help: {"; ".join(helps)}'


def _ways(task: CutProblem) -> list[tuple[str, CutProblem]]:
    ways = [(f'{task.stages * factor} ranks',
             dataclasses.replace(task, stages=task.stages * factor))
            for factor in (2, 4)]
    if task.recompute is False:
        ways.insert(0, ("recompute='auto'", dataclasses.replace(
            task, recompute='auto')))
    return ways


def least_memory(intervals: Intervals, task: CutProblem) -> float:
    """The smallest limit under which there is a cut, in bytes."""
    if task.parts > intervals.count:
        return math.inf
    shape = intervals.count + 1, intervals.count + 1
    empty = numpy.tril(numpy.ones(shape, bool))
    best: Any = None
    for live in task.live():
        needed = _table(intervals, task, live, task.recompute is True)
        if task.recompute == 'auto':
            needed = numpy.minimum(needed, _table(intervals, task, live,
                                                  True))
        needed = numpy.where(empty, numpy.inf, needed)
        # The least possible bytes of the largest chunk up to each atom.
        best = (needed[0] if best is None else
                numpy.maximum(best[:, None], needed).min(axis=0))
    return task.overhead + task.chunks * float(best[-1])
