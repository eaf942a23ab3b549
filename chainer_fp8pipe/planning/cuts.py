"""Where to cut a model: the shortest step under a memory limit."""
# Dynamic programming over all intervals finds the cut whose slowest chunk is
# fastest, and cuts nearly as good that move fewer bytes; of these the one with
# the shortest step is taken.  Where activations do not fit, a chunk keeps its
# inputs only and runs forward twice.  After Tanaka et al., "Automatic Graph
# Partitioning for Very Large-scale Deep Learning" (RaNNC, IPDPS 2021), section
# IV, where operations are joined to blocks first.
#
# Only the number of micro-batches that are live tells chunks of a cut apart,
# so there is a table of seconds for each such number: seconds of an interval
# as a chunk, infinite where it is empty or needs too much memory.  Memory is a
# promise: no plan is made whose fullest rank needs more than the limit.  Each
# chunk of a rank gets an equal share of it, which refuses some cuts that would
# fit; with one chunk a rank, the usual case, none.
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ..pipeline.schedules import Kind, make_schedule
from ..report.quantities import counted, size
from .intervals import Intervals
from .partition_plan import Cut, PartitionPlan, Predicted

#: By how much the slowest stage may be slower if fewer bytes cross then.
_SLACKS = (0.0, 0.02, 0.05, 0.1)


class DoesNotFit(ValueError):
    """No cut fits into the memory of the ranks."""


class Wire(NamedTuple):
    """Between two ranks: n bytes take ``latency + n / bandwidth`` seconds."""

    latency: float
    bandwidth: float


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
        wire: Between stages; the latency is that of a message, packing
            included.
        overhead: Bytes of each rank whatever the rank computes.
        temporary: Bytes that an update of a parameter takes for a while, as
            a multiple of the parameter's.
    """

    stages: int
    micro_batches: int
    schedule: str = '1f1b'
    chunks: int = 1
    memory: float | None = None
    copies: float = 5.0
    recompute: str | bool = 'auto'
    wire: Wire = Wire(1e-4, 2e9)
    overhead: float = 0.0
    temporary: float = 0.0

    @property
    def chunk_count(self) -> int:
        """Chunks of all ranks."""
        return self.stages * self.chunks

    @property
    def share(self) -> float:
        """Bytes that each chunk of a rank may take."""
        memory = math.inf if self.memory is None else self.memory
        return (memory - self.overhead) / self.chunks

    @property
    def repeats(self) -> tuple[bool, ...]:
        """Whether chunks may run forward once, and whether twice."""
        return ((False, True) if self.recompute == 'auto'
                else (bool(self.recompute),))

    def live(self) -> tuple[int, ...]:
        """For each chunk, how many micro-batches are live at a time at most.

        A micro-batch is live from its forward pass to the end of its
        backward pass.
        """
        return _live(self.schedule, self.stages, self.micro_batches,
                     self.chunks)


@functools.lru_cache(maxsize=16)
def _live(*schedule: Any) -> tuple[int, ...]:
    steps = make_schedule(*schedule)
    now, most = ([0] * (steps.last_chunk + 1) for _ in range(2))
    for actions in steps.actions:
        for kind, _, chunk in actions:
            now[chunk] += kind is Kind.FORWARD
            most[chunk] = max(most[chunk], now[chunk])
            now[chunk] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return tuple(most)


def search(intervals: Intervals, problem: CutProblem) -> PartitionPlan:
    """The plan with the shortest step.

    Raises:
        DoesNotFit: Saying by how much, and what would help.
        ValueError: There are fewer atoms than chunks.
    """
    if intervals.count < problem.chunk_count:
        raise ValueError(
            f'the model can be cut into {intervals.count} parts at most, but '
            f'{problem.chunk_count} are asked for; use fewer ranks')
    found = [plan_of(intervals, problem, ends)
             for ends in _candidates(intervals, problem)]
    if not found:
        raise DoesNotFit(_why(intervals, problem))
    return min(found, key=lambda plan: plan.predicted.seconds)


def plan_of(intervals: Intervals, problem: CutProblem, ends: Sequence[int]
            ) -> PartitionPlan:
    """The plan of a cut, with its step, memory and messages as predicted.

    Args:
        intervals: Of the model.
        problem: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
    """
    again, memory = rank_bytes(intervals, problem, ends)

    def chunks(sums: numpy.ndarray) -> list[float]:
        return numpy.diff(sums[[0, *ends]]).tolist()
    forward = chunks(intervals.forward)
    busy = tuple(one * (1 + twice) + other for one, twice, other in zip(
        forward, again, chunks(intervals.backward), strict=True))
    crossing = tuple(float(intervals.crossing[end]) for end in ends[:-1])
    return PartitionPlan(
        intervals.order, tuple(Cut.at(
            intervals.order, intervals.starts[end]) for end in ends[:-1]),
        problem.stages, again, problem.micro_batches, problem.schedule,
        Predicted(_step(problem, busy, chunks(intervals.weights), crossing),
                  busy, memory, crossing))


def _step(problem: CutProblem, busy: Sequence[float],
          weights: Sequence[float], crossing: Sequence[float]) -> float:
    """Seconds of a step: the slowest rank's work, and its bubble.

    In the bubble a micro-batch goes through the other ranks, and between all
    of them.
    """
    ranks = [sum(busy[rank::problem.stages]) for rank in range(problem.stages)]
    slowest = max(range(problem.stages), key=ranks.__getitem__)
    bubble = sum(ranks) - ranks[slowest] + 2 * sum(
        problem.wire.latency + nbytes / problem.wire.bandwidth
        for nbytes in crossing)
    if problem.schedule == 'zero_bubble':   # they wait, and fill it
        bubble -= 2 * (sum(weights) - weights[slowest])
    return (problem.micro_batches * ranks[slowest]
            + max(bubble, 0.0) / problem.chunks)


# --- the search -------------------------------------------------------------

def _candidates(intervals: Intervals, problem: CutProblem
                ) -> list[tuple[int, ...]]:
    """Ends of the chunks of cuts that may be the best; none fits: []."""
    edge = (intervals.crossing / problem.wire.bandwidth
            + (intervals.crossing > 0) * problem.wire.latency)
    traffic = edge[:, None] + edge[None, :]
    forward = intervals.forward[None, :] - intervals.forward[:, None]
    forward = numpy.where(intervals.once, 0.0, forward)     # not again
    plain = _not_empty(intervals.seconds() + 2 * traffic)
    seconds = [plain + repeats * forward for repeats in problem.repeats]

    def limited(live: int) -> numpy.ndarray:
        """Seconds where memory is enough, if need be with recomputation."""
        if problem.memory is None:
            return seconds[0]
        return numpy.min([
            numpy.where(_bytes(intervals, problem, live, repeats)
                        > problem.share, numpy.inf, cost)
            for repeats, cost in zip(problem.repeats, seconds, strict=True)],
            axis=0)
    tables = {live: limited(live) for live in set(problem.live())}
    costs = [tables[live] for live in problem.live()]
    slowest = _least_maximum(costs)
    if not numpy.isfinite(slowest):
        return []
    return list(dict.fromkeys(
        _least_traffic(costs, traffic, slowest * (1 + slack) + 1e-12)
        for slack in _SLACKS))


def _least_maximum(tables: Sequence[numpy.ndarray]) -> float:
    """The least possible value of the largest chunk; a table per chunk."""
    best = tables[0][0]         # for the first chunks up to each atom
    for table in tables[1:]:
        best = numpy.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def _least_traffic(costs: Sequence[numpy.ndarray], traffic: numpy.ndarray,
                   bound: float) -> tuple[int, ...]:
    """Ends of chunks of which none takes longer than the bound."""
    total, *others = (numpy.where(cost > bound, numpy.inf,
                                  traffic + cost * 1e-6) for cost in costs)
    total, origins = total[0], []
    for table in others:
        sums = total[:, None] + table
        origins.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    ends = [len(traffic) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return tuple(reversed(ends))


def _not_empty(table: numpy.ndarray) -> numpy.ndarray:
    """The table with infinity for intervals without atoms."""
    return numpy.where(numpy.tri(len(table), dtype=bool), numpy.inf, table)


# --- memory -----------------------------------------------------------------

def rank_bytes(intervals: Intervals, problem: CutProblem, ends: Sequence[int],
               recompute: Sequence[bool] = ()
               ) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Which chunks run forward twice, and the bytes of each rank.

    Args:
        intervals: Of the model.
        problem: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
        recompute: Which chunks run forward twice; (): as the problem says.
    """
    again: list[bool] = []
    memory = [problem.overhead] * problem.stages
    for chunk, (start, end, live) in enumerate(zip(
            [0, *ends[:-1]], ends, problem.live(), strict=True)):
        plain, short = (
            float(_bytes(intervals, problem, live, repeats, start, end))
            for repeats in (False, True))
        repeat = recompute[chunk] if recompute else (
            not intervals.once[start, end] and (
                problem.recompute is True or (
                    problem.recompute == 'auto' and plain > problem.share)))
        again.append(bool(repeat))
        memory[chunk % problem.stages] += short if repeat else plain
    return tuple(again), tuple(memory)


def least_memory(intervals: Intervals, problem: CutProblem) -> float:
    """The smallest limit under which there is a cut, in bytes."""
    if problem.chunk_count > intervals.count:
        return math.inf
    tables = {live: _not_empty(numpy.min([
        _bytes(intervals, problem, live, repeats)
        for repeats in problem.repeats], axis=0))
        for live in set(problem.live())}
    return problem.overhead + problem.chunks * _least_maximum(
        [tables[live] for live in problem.live()])


def _bytes(intervals: Intervals, problem: CutProblem, live: int,
           repeats: bool, *interval: int) -> Any:
    """Bytes of an interval as a chunk, or of all, at the worst moment.

    Parameters with gradients and the optimizer's state; and activations,
    messages and temporary arrays, of which nothing is left when parameters
    are updated.
    """
    start, end = interval or numpy.ogrid[:intervals.count + 1,
                                         :intervals.count + 1]
    kept = intervals.kept[start, end]
    if problem.schedule == 'zero_bubble':
        kept, repeats = kept + intervals.deferred[start, end], False
    again = repeats & ~intervals.once[start, end]
    inputs, outputs = intervals.crossing[start], intervals.crossing[end]
    passes = (intervals.temporary[start, end] + 2 * (inputs + outputs)
              + live * inputs + numpy.where(again, 1, live) * kept)
    return (intervals.parameters[start, end] * problem.copies
            + numpy.maximum(passes, intervals.updating(
                start, end, problem.temporary)))


def _why(intervals: Intervals, problem: CutProblem) -> str:
    """The text of DoesNotFit: how many bytes are missing, and remedies."""
    assert problem.memory is not None
    needed = least_memory(intervals, problem)
    said = (f'no cut into {counted(problem.stages, "stage")} fits into '
            f'{size(problem.memory)} per rank; the best needs '
            f'{size(needed, up=True)}, '
            f'{size(needed - problem.memory, up=True)} more')
    if problem.memory <= problem.overhead:
        return (f'{said}. A rank takes {size(problem.overhead)} for '
                'code and buffers, whatever the model is; raise the limit')
    ways = {f'{problem.stages * factor} ranks': dataclasses.replace(
        problem, stages=problem.stages * factor) for factor in (2, 4)}
    if problem.recompute is False:
        ways = {"recompute='auto'": dataclasses.replace(
            problem, recompute='auto'), **ways}
    least = {name: least_memory(intervals, way) for name, way in ways.items()}
    helps = [f'{name} ({size(most, up=True)})'
             for name, most in least.items() if most <= problem.memory]
    return (f'{said}. What would help: '
            f'{"; ".join([*helps, "smaller micro-batches"])}')
