"""Where to cut a model: the shortest step under a memory limit."""
# Calls are sorted by position.  Neighbours between which no cut is allowed
# form an *atom*; a chunk is an interval [i, j] of the atoms i to j - 1, and
# all intervals are weighed at once.  Dynamic programming finds the cut whose
# slowest chunk is fastest, and of cuts nearly as good the one that moves the
# fewest bytes.  Where activations do not fit, a chunk keeps its inputs only
# and runs forward twice.  After Tanaka et al., "Automatic Graph Partitioning
# for Very Large-scale Deep Learning" (RaNNC, IPDPS 2021), section IV.
#
# Only the number of micro-batches that are live tells chunks of a cut apart,
# so there is a table of seconds for each such number: infinite where an
# interval is empty or needs too much memory.  Memory is a promise: no plan is
# made whose fullest rank needs more than the limit.  Each chunk of a rank gets
# an equal share of it, which refuses some cuts that would fit; with one chunk
# a rank, the usual case, none.
from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..pipeline.schedules import Kind, make_schedule
from ..report.quantities import counted, size
from .calls import Call, Order, Position, Source, Value, positions
from .plan import Cut, PartitionPlan, Predicted

#: More atoms than these are joined, as tables grow with their number squared.
_ATOMS = 400
#: By how much the slowest chunk may be slower if fewer bytes cross then.
_SLACK = 0.02
#: Of a message, packing included: seconds, and bytes per second.
LATENCY, BANDWIDTH = 1e-4, 2e9
#: The allocator (glibc's) keeps what was freed of smaller arrays, and gives
#: larger ones back to the system; it keeps twice as much at most.
HEAP_BYTES = 32 << 20


class DoesNotFit(ValueError):
    """No cut fits into the memory of the ranks."""


@dataclass(frozen=True)
class CutProblem:
    """Conditions for a cut."""

    stages: int
    micro_batches: int
    schedule: str = '1f1b'
    chunks: int = 1             # of each rank
    memory: float | None = None     # bytes beyond the interpreter's
    #: Arrays as large as the parameters that a rank keeps: values, gradients,
    #: the optimizer's state.
    copies: float = 5.0
    #: Whether chunks keep their inputs only and run forward twice: 'auto'
    #: (where memory is too small otherwise), True (all that may) or False.
    recompute: str | bool = 'auto'
    overhead: float = 0.0       # bytes of each rank whatever it computes
    #: Bytes that an update of a parameter takes for a while, as a multiple of
    #: the parameter's.
    temporary: float = 0.0

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

    @functools.cached_property
    def live(self) -> tuple[int, ...]:
        """For each chunk, how many micro-batches are live at a time at most.

        A micro-batch is live from its forward pass to the end of its
        backward pass.
        """
        steps = make_schedule(self.schedule, self.stages, self.micro_batches,
                              self.chunks)
        now, most = ([0] * (steps.last_chunk + 1) for _ in range(2))
        for kind, _, chunk in itertools.chain(*steps.actions):
            now[chunk] += kind is Kind.FORWARD
            most[chunk] = max(most[chunk], now[chunk])
            now[chunk] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        return tuple(most)


class Intervals:
    """Seconds and bytes of all intervals of a program's atoms.

    Tables are [atoms + 1, atoms + 1], and element [i, j] is about an interval,
    0 where j <= i.  Bytes are those of one micro-batch.
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Value]) -> None:
        place = positions(calls, order)
        atoms = _atoms(calls, place)
        if not order:       # a plan names its cuts by parameters
            atoms = [sum(atoms, [])]
        self.order = order
        #: The position of each atom's first call.
        self.starts = [place[atom[0]] for atom in atoms]
        atom_of = {number: index for index, atom in enumerate(atoms)
                   for number in atom}
        inputs, used = (_readers(calls, what)
                        for what in ('inputs', 'parameters'))

        def nbytes(one: Source | str) -> int:
            return (parameters[one] if isinstance(one, str) else
                    calls[one.call].outputs[one.output]).nbytes

        def total(cost: Callable[[Call], float]) -> numpy.ndarray:
            sums = numpy.cumsum([0.0, *(sum(
                cost(calls[number]) for number in atom) for atom in atoms)])
            return numpy.triu(sums - sums[:, None]).astype('f')

        def largest(cost: Callable[[int], float]) -> numpy.ndarray:
            row = [0.0, *(max(map(cost, atom)) for atom in atoms)]
            return numpy.maximum.accumulate(numpy.triu(numpy.tile(
                row, (len(row), 1)).astype('f'), 1), axis=1)

        def union(readers: Mapping[Any, list[int]]) -> numpy.ndarray:
            """Each thing counts at its first use in an interval."""
            found = numpy.zeros([self.count + 1] * 2, 'f')
            for thing, numbers in readers.items():
                for before, atom in itertools.pairwise((-1, *sorted({
                        atom_of[number] for number in numbers}))):
                    found[before + 1:atom + 1, atom + 1:] += nbytes(thing)
            return found
        #: Tables of seconds.
        self.forward = total(lambda call: call.forward)
        self.backward = total(lambda call: call.backward)
        #: Tables of the bytes of parameters, and of the largest of them.
        self.parameters = union(used)
        self.largest = largest(lambda number: max(
            map(nbytes, calls[number].parameters), default=0))
        #: Tables of bytes kept for backward, and, where gradients of weights
        #: are put off, for these.
        self.kept = union(_readers(calls, 'retained')) + total(
            lambda call: call.kept)
        self.deferred = total(lambda call: call.deferrable and sum(
            value.nbytes for value in call.outputs.values()))
        #: Bytes that go from before each atom to it or beyond, [atoms + 1].
        self.crossing = _spanning(self.count, [
            (atom_of[source.call], max(map(atom_of.__getitem__, numbers)),
             nbytes(source)) for source, numbers in inputs.items()])
        # Backward goes from call to call.  A gradient waits from the visit of
        # the value's last reader to that of the call that has made it.
        waits = _spanning(len(calls), [
            *((source.call, numbers[-1] - 1, nbytes(source))
              for source, numbers in inputs.items()
              if calls[source.call].outputs[source.output].wants),
            *((numbers[0] - 1, numbers[-1] - 1, nbytes(name))
              for name, numbers in used.items())])
        #: Table of the bytes of temporary arrays, and of gradients that wait,
        #: at the worst moment.
        self.temporary = largest(
            lambda number: calls[number].temporary + waits[number])

    @property
    def count(self) -> int:
        """Number of atoms."""
        return len(self.starts)

    def ends_of(self, cuts: Sequence[Position]) -> tuple[int, ...]:
        """Index after the last atom of each chunk, for a plan's cuts."""
        return (*(sum(start < cut for start in self.starts) for cut in cuts),
                self.count)

    def nbytes(self, problem: CutProblem, live: int, repeats: bool
               ) -> numpy.ndarray:
        """Table of the bytes of a chunk at the worst moment.

        Parameters with gradients and the optimizer's state; and activations,
        messages and temporary arrays, of which nothing is left when
        parameters are updated.
        """
        kept = self.kept
        if problem.schedule == 'zero_bubble':
            kept, repeats = kept + self.deferred, False
        inputs, outputs = self.crossing[:, None], self.crossing
        passes = (self.temporary + 2 * (inputs + outputs) + live * inputs
                  + (1 if repeats else live) * kept)
        # While the largest is updated, the allocator still has what smaller
        # ones have needed.
        update = problem.temporary * self.largest
        update += numpy.where(self.largest > HEAP_BYTES, numpy.minimum(
            update, 2 * HEAP_BYTES), 0)
        return (self.parameters * problem.copies
                + numpy.maximum(passes, update))


def search(intervals: Intervals, problem: CutProblem) -> PartitionPlan:
    """The plan whose slowest chunk is fastest, or nearly so.

    Raises:
        DoesNotFit: Saying by how much, and what would help.
        ValueError: There are fewer atoms than chunks.
    """
    chunks = problem.stages * problem.chunks
    if intervals.count < chunks:
        raise ValueError(
            f'the model can be cut into {intervals.count} parts at most, but '
            f'{chunks} are asked for; use fewer ranks')
    edge = intervals.crossing / BANDWIDTH + (
        intervals.crossing > 0) * LATENCY
    traffic = edge[:, None] + edge
    plain = intervals.forward + intervals.backward + 2 * traffic

    def seconds(live: int) -> numpy.ndarray:
        return numpy.min([numpy.where(
            intervals.nbytes(problem, live, repeats) > problem.share,
            numpy.inf, plain + repeats * intervals.forward)
            for repeats in problem.repeats[:1 if problem.memory is None
                                           else None]], axis=0)
    slowest, _ = _best(problem, seconds, numpy.maximum)
    if not numpy.isfinite(slowest):
        raise DoesNotFit(_why(intervals, problem))
    bound = slowest * (1 + _SLACK) + 1e-12
    _, ends = _best(problem, lambda live: numpy.where(
        (cost := seconds(live)) > bound, numpy.inf, traffic + cost * 1e-6),
        numpy.add)
    return plan_of(intervals, problem, ends)


def plan_of(intervals: Intervals, problem: CutProblem, ends: Sequence[int],
            recompute: Sequence[bool] = ()) -> PartitionPlan:
    """The plan of a cut, with its times, memory and messages as predicted.

    Args:
        intervals: Of the model.
        problem: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
        recompute: Which chunks run forward twice; (): as the problem says.
    """
    again: list[bool] = []
    busy: list[float] = []
    memory = [problem.overhead] * problem.stages
    for chunk, (start, end, live) in enumerate(zip(
            [0, *ends[:-1]], ends, problem.live, strict=True)):
        plain, short = (
            float(intervals.nbytes(problem, live, repeats)[start, end])
            for repeats in (False, True))
        again.append(bool(recompute[chunk] if recompute else (
            True in problem.repeats and (
                problem.recompute is True or plain > problem.share))))
        busy.append(float(intervals.forward[start, end] * (1 + again[-1])
                          + intervals.backward[start, end]))
        memory[chunk % problem.stages] += short if again[-1] else plain
    return PartitionPlan(
        intervals.order, tuple(Cut.at(
            intervals.order, intervals.starts[end]) for end in ends[:-1]),
        problem.stages, tuple(again), problem.micro_batches, problem.schedule,
        Predicted(tuple(busy), tuple(memory), tuple(
            float(intervals.crossing[end]) for end in ends[:-1])))


def _best(problem: CutProblem, table: Callable[[int], numpy.ndarray],
          join: Callable) -> tuple[float, tuple[int, ...]]:
    """The least joined value of all chunks, and where the chunks end.

    ``table`` gives the values of intervals, for live micro-batches.
    """
    tables = {live: table(live) for live in set(problem.live)}
    for one in tables.values():     # no chunk is without atoms
        one[numpy.tri(len(one), dtype=bool)] = numpy.inf
    best, origins = tables[problem.live[0]][0], []
    for live in problem.live[1:]:   # of the first chunks up to each atom
        joined = join(best[:, None], tables[live])
        origins.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    ends = [len(best) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return float(best[-1]), tuple(reversed(ends))


def _why(intervals: Intervals, problem: CutProblem) -> str:
    """The text of DoesNotFit: how many bytes are missing, and remedies."""
    assert problem.memory is not None
    least, _ = _best(problem, lambda live: numpy.min([
        intervals.nbytes(problem, live, repeats)
        for repeats in problem.repeats], axis=0), numpy.maximum)
    needed = problem.overhead + problem.chunks * least
    return (f'no cut into {counted(problem.stages, "stage")} fits into '
            f'{size(problem.memory)} per rank; the best needs '
            f'{size(needed, up=True)}, of which {size(problem.overhead)} are '
            'for code and buffers. What would help: more ranks, smaller '
            'micro-batches' + ", recompute='auto'" * (
                problem.recompute is False))


def _atoms(calls: Sequence[Call], place: Sequence[Position]
           ) -> list[list[int]]:
    """Numbers of the calls of each atom, in the order of positions."""
    rows = sorted(range(len(calls)), key=lambda number: place[number])
    # Rows before which no cut is allowed: inside of a link to be whole.
    spans: dict[str, list[int]] = {}
    for index, number in enumerate(rows):
        for name in calls[number].whole:
            spans.setdefault(name, [index, index])[1] = index
    together = {index for first, last in spans.values()
                for index in range(first + 1, last + 1)}
    # A depth at a place that a parameter comes to twice is a step of a loop;
    # other batches may have more steps.
    visits = collections.Counter(
        (name, place[number].place) for number, call in enumerate(calls)
        for name in set(call.parameters))
    loops = {of for (_, of), times in visits.items() if times > 1}
    atoms: list[list[int]] = []
    for index, number in enumerate(rows):
        here = place[number]
        if index and (here == place[rows[index - 1]] or index in together
                      or (here.depth and here.place in loops)):
            atoms[-1].append(number)
        else:
            atoms.append([number])
    joined = max(1, -(-len(atoms) // _ATOMS))
    return [sum(atoms[start:start + joined], [])
            for start in range(0, len(atoms), joined)]


def _readers(calls: Sequence[Call], what: str) -> dict[Any, list[int]]:
    """Numbers of the calls that have each of their inputs or parameters."""
    found: dict[Any, list[int]] = {}
    for number, call in enumerate(calls):
        for one in dict.fromkeys(getattr(call, what)):
            found.setdefault(one, []).append(number)
    return found


def _spanning(count: int, spans: Iterable[tuple[int, int, float]]
              ) -> numpy.ndarray:
    """For each place the sum of the spans over it, float64[count + 1].

    A span is a place, the last place to which it goes, and what it adds to
    all after the first one.
    """
    changes = numpy.zeros(count + 2)
    for first, last, value in spans:
        if first < last:
            changes[[first + 1, last + 1]] += value, -value
    return changes.cumsum()[:-1]
