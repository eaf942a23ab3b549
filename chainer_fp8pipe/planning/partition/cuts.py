"""Where to cut a model: the shortest step under a memory limit.

Dynamic programming over all intervals finds the cut whose slowest stage is
fastest, and cuts nearly as good that move fewer bytes; the simulator of
schedules says which of them has the shortest step.  Where activations do not
fit, a stage keeps its inputs only and runs forward twice.  After Tanaka et
al., "Automatic Graph Partitioning for Very Large-scale Deep Learning" (RaNNC,
IPDPS 2021), section IV, where operations are joined to blocks first.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ...pipeline.schedules import Kind, Schedule, make_schedule
from ..schedule_time import Costs, Link, step_time
from ..sizes import counted, said_bytes
from .calls import Call, Parameter
from .intervals import Intervals
from .partition_plan import PartitionPlan, Predicted
from .positions import Order

#: By how much the slowest stage may be slower if fewer bytes cross then.
_SLACKS = (0.0, 0.02, 0.05, 0.1)

#: A search asks for the same schedule again and again, and making a schedule
#: takes as long as simulating it.
_schedule = functools.lru_cache(maxsize=16)(make_schedule)


class DoesNotFit(ValueError):
    """No cut fits into the memory of the ranks."""


@dataclass(frozen=True)
class Wire:
    """Seconds per message, packing included, and bytes per second."""

    latency: float = 1e-4
    bandwidth: float = 2e9


@dataclass(frozen=True)
class CutProblem:
    """Conditions for a cut.

    Attributes:
        stages: Ranks of the pipeline.
        micro_batches: Into how many a batch is cut.
        schedule: Name of the schedule.
        chunks: How many each rank has.
        memory: Limit of bytes of a rank beyond the interpreter's; None: no
            limit.
        copies: Arrays as large as the parameters that a rank keeps: values,
            gradients, the optimizer's state.
        recompute: Whether stages keep their inputs only and run forward
            twice: ``'auto'`` (where memory is too small otherwise), True (all
            that may run forward twice) or False.
        wire: Between stages.
        overhead: Bytes of each rank whatever the rank computes.
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
        return list(_live(self.schedule, self.stages, self.micro_batches,
                          self.chunks))


@functools.lru_cache(maxsize=16)
def _live(*schedule: Any) -> tuple[int, ...]:
    """See :meth:`CutProblem.live`."""
    steps = _schedule(*schedule)
    now, most = ([0] * (steps.last_chunk + 1) for _ in range(2))
    for actions in steps.actions:
        for kind, _, chunk in actions:
            now[chunk] += kind is Kind.FORWARD
            most[chunk] = max(most[chunk], now[chunk])
            now[chunk] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return tuple(most)


@dataclass(frozen=True)
class Cut:
    """A cut with its predicted seconds and bytes.

    Attributes:
        ends: Index after the last atom of each chunk.
        recompute: Which chunks keep their inputs only.
        predicted: Seconds and bytes.
    """

    ends: tuple[int, ...]
    recompute: tuple[bool, ...]
    predicted: Predicted


def search(calls: Sequence[Call], order: Order,
           parameters: Mapping[str, Parameter], task: CutProblem
           ) -> PartitionPlan:
    """The plan with the shortest step for the calls of a trace.

    Raises:
        DoesNotFit: There is none under the memory limit.
        ValueError: The model cannot be cut into so many parts.
    """
    intervals = Intervals(calls, order, parameters)
    cut = best_cut(intervals, task)
    return PartitionPlan(
        order, tuple(intervals.starts[end] for end in cut.ends[:-1]),
        task.stages, cut.recompute, task.micro_batches, task.schedule,
        cut.predicted)


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
    return min(found, key=lambda cut: cut.predicted.seconds)


def evaluate(intervals: Intervals, task: CutProblem, ends: Sequence[int],
             recompute: Sequence[bool] | None = None) -> Cut:
    """Predicts the step, the memory and the messages of a cut.

    Args:
        intervals: Of the model.
        task: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
        recompute: Which chunks run forward twice; None: as the task says.
    """
    again, memory = rank_bytes(intervals, task, ends, recompute)
    costs = chunk_costs(intervals, ends, again, task.defers)
    crossing = [float(intervals.crossing[end]) for end in ends[:-1]]
    seconds = step_time(task.steps(), costs, Link(
        task.wire.latency, task.wire.bandwidth, crossing))
    return Cut(tuple(ends), again, Predicted(
        seconds, tuple(map(sum, costs)), memory, tuple(crossing)))


def rank_bytes(intervals: Intervals, task: CutProblem, ends: Sequence[int],
               recompute: Sequence[bool] | None = None
               ) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Which chunks run forward twice, and the bytes of each rank.

    The arguments are those of :func:`evaluate`.
    """
    starts = [0, *ends[:-1]]
    again: list[bool] = []
    parts: list[list[_Bytes]] = [[] for _ in range(task.stages)]
    for chunk, (start, end, live) in enumerate(zip(
            starts, ends, task.live(), strict=True)):
        plain, short = (
            _parts(intervals, task, live, recomputes, start, end)
            for recomputes in (False, True))
        repeat = recompute[chunk] if recompute else (
            not intervals.once[start, end] and (
                task.recompute is True or (
                    task.recompute == 'auto' and task.memory is not None
                    and _most(intervals, plain) > _share(task))))
        again.append(bool(repeat))
        parts[chunk % task.stages].append(short if repeat else plain)
    return tuple(again), tuple(task.overhead + _of_rank(intervals, chunks)
                               for chunks in parts)


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
        weights *= defers
        costs.append(Costs(forward, backward - weights, weights,
                           forward * again))
    return costs


class _Tables:
    """The seconds of every interval as each chunk, for dynamic programming.

    They are infinite where an interval is empty or needs too much memory.
    """

    def __init__(self, intervals: Intervals, task: CutProblem) -> None:
        self._intervals, self._task = intervals, task
        edge = (intervals.crossing / task.wire.bandwidth
                + (intervals.values > 0) * task.wire.latency)
        self._traffic = edge[:, None] + edge[None, :]
        forward = intervals.forward[None, :] - intervals.forward[:, None]
        forward = numpy.where(intervals.once, 0.0, forward)     # not again
        plain = _not_empty(intervals.seconds() + 2 * self._traffic)
        if task.recompute is True:
            plain = plain + forward
        tables = {live: self._limited(plain, forward, live)
                  for live in set(task.live())}
        self._costs = [tables[live] for live in task.live()]

    def candidates(self) -> list[tuple[int, ...]]:
        """Cuts that may be the best."""
        slowest = _least_maximum(self._costs)
        if not numpy.isfinite(slowest):
            return []
        return list(dict.fromkeys(
            self._least_traffic(slowest * (1 + slack) + 1e-12)
            for slack in _SLACKS))

    def _limited(self, cost: numpy.ndarray, forward: numpy.ndarray,
                 live: int) -> numpy.ndarray:
        """Seconds where memory is enough, if need be with recomputation."""
        task = self._task
        if task.memory is None:
            return cost
        share = _share(task)
        needed = _bytes(self._intervals, task, live, task.recompute is True)
        limited = numpy.where(needed > share, numpy.inf, cost)
        if task.recompute == 'auto':
            short = _bytes(self._intervals, task, live, True)
            limited = numpy.minimum(limited, numpy.where(
                short > share, numpy.inf, cost + forward))
        return limited

    def _least_traffic(self, bound: float) -> tuple[int, ...]:
        """Ends of chunks of which none takes longer than the bound."""
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


class _Bytes(NamedTuple):
    """What a chunk needs.

    Attributes:
        fixed: Parameters, gradients, optimizer's state.
        passes: Activations, messages, temporary arrays.
        largest: The largest parameter.
        in_heap: The largest that the allocator does not give back.
    """

    fixed: Any
    passes: Any
    largest: Any
    in_heap: Any


def _most(intervals: Intervals, parts: _Bytes) -> Any:
    """All at the worst moment.

    When parameters are updated, nothing of the passes is left.
    """
    return parts.fixed + numpy.maximum(parts.passes, intervals.updating(
        parts.largest, parts.in_heap))


def _of_rank(intervals: Intervals, chunks: Sequence[_Bytes]) -> float:
    """The bytes of the chunks of a rank."""
    fixed, passes, largest, in_heap = zip(*chunks, strict=True)
    # One parameter is updated after the other.
    return float(_most(intervals, _Bytes(
        sum(fixed), sum(passes), max(largest), max(in_heap))))


def _bytes(intervals: Intervals, task: CutProblem, live: int,
           recomputes: bool) -> Any:
    """A table of the bytes of all intervals as chunks."""
    start, end = numpy.ogrid[:intervals.count + 1, :intervals.count + 1]
    return _most(intervals, _parts(intervals, task, live, recomputes, start,
                                   end))


def _parts(intervals: Intervals, task: CutProblem, live: int,
           recomputes: bool, start: Any, end: Any) -> _Bytes:
    inputs, kept = intervals.crossing[start], intervals.kept[start, end]
    if task.defers:
        kept = kept + intervals.deferred[start, end]
        recomputes = False
    again = recomputes & ~intervals.once[start, end]
    passes = (intervals.temporary[start, end] + 2 * (
        intervals.crossing[start] + intervals.crossing[end])
        + live * inputs + numpy.where(again, 1, live) * kept)
    return _Bytes(intervals.parameters[start, end] * task.copies, passes,
                  intervals.largest[start, end],
                  intervals.largest_in_heap[start, end])


def _not_empty(table: numpy.ndarray) -> numpy.ndarray:
    """The table with infinity for intervals without atoms."""
    return numpy.where(numpy.tri(len(table), dtype=bool), numpy.inf, table)


def _least_maximum(tables: Sequence[numpy.ndarray]) -> float:
    """The least possible value of the largest chunk; a table per chunk."""
    best = tables[0][0]         # for the first chunks up to each atom
    for table in tables[1:]:
        best = numpy.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def _why(intervals: Intervals, task: CutProblem) -> str:
    """The text of DoesNotFit: how many bytes are missing, and remedies."""
    assert task.memory is not None
    needed = least_memory(intervals, task)
    said = (f'no cut into {counted(task.stages, "stage")} fits into '
            f'{said_bytes(task.memory)} per rank; the best needs '
            f'{said_bytes(needed, up=True)}, '
            f'{said_bytes(needed - task.memory, up=True)} more')
    if task.memory <= task.overhead:
        return (f'{said}. A rank takes {said_bytes(task.overhead)} for code '
                'and buffers, whatever the model is; raise the limit')
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
    ways = ((False, True) if task.recompute == 'auto'
            else (task.recompute is True,))
    tables = {live: _not_empty(numpy.min([
        _bytes(intervals, task, live, way) for way in ways], axis=0))
        for live in set(task.live())}
    return task.overhead + task.chunks * _least_maximum(
        [tables[live] for live in task.live()])
