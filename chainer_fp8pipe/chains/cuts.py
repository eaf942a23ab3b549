"""Where to cut a model: the shortest step under a memory limit."""
# Calls are sorted by position.  Neighbours between which no cut is allowed
# form an *atom*; a chunk is an interval [i, j] of the atoms i to j - 1, and
# all intervals are weighed at once.  Dynamic programming finds the cut whose
# slowest chunk is fastest, and of cuts nearly as good the one that sends and
# repeats least.  Where activations do not fit, a chunk keeps its inputs only
# and runs forward twice.  After Tanaka et al., "Automatic Graph Partitioning
# for Very Large-scale Deep Learning" (RaNNC, IPDPS 2021), section IV.
#
# Only the number of micro-batches that are live tells chunks of a cut apart,
# so there are tables for each such number.  Memory is a promise: no plan is
# made whose fullest rank needs more than the limit.  Each chunk of a rank gets
# an equal share of it, which refuses some cuts that would fit; with one chunk
# a rank, the usual case, none.
from __future__ import annotations

import bisect
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
from .plan import PartitionPlan

#: More atoms than these are joined, as tables grow with their number squared.
_ATOMS = 400
#: By how much the slowest chunk may be slower if all together are faster.
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
    #: (where memory is too small otherwise), True, False, or one for each.
    recompute: str | bool | tuple[bool, ...] = 'auto'
    overhead: float = 0.0       # bytes of each rank whatever it computes
    #: Bytes that an update of a parameter takes for a while, as a multiple of
    #: the parameter's.
    temporary: float = 0.0

    @property
    def share(self) -> float:
        """Bytes that each chunk of a rank may take."""
        memory = math.inf if self.memory is None else self.memory
        return (memory - self.overhead) / self.chunks

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


#: Tables of what each interval takes as a certain chunk: seconds per
#: micro-batch, bytes at the worst moment, whether it runs forward twice.
Costs = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]


class Intervals:
    """Seconds and bytes of all intervals of a program's atoms.

    Tables are [atoms + 1, atoms + 1], and element [i, j] is about an interval,
    0 where j <= i.  Bytes are those of one micro-batch.  Where there are cuts
    already, the chunks between them are the atoms.
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Value],
                 cuts: Sequence[tuple[int, ...]] | None = None) -> None:
        place = positions(calls, order)
        atoms = _atoms(calls, place) if cuts is None else [
            [number for number, here in enumerate(place)
             if bisect.bisect_right(cuts, here) == chunk]
            for chunk in range(len(cuts) + 1)]
        self.order = order
        #: Where each atom begins.
        self.starts: list[Any] = [
            place[atom[0]] for atom in atoms] if cuts is None else [
                (0, 0), *cuts]
        self.count = len(atoms)
        atom_of = {number: index for index, atom in enumerate(atoms)
                   for number in atom}
        readers: dict[Any, list[int]] = {}
        for number, call in enumerate(calls):
            for one in {*call.inputs, *call.parameters}:
                readers.setdefault(one, []).append(number)

        def nbytes(one: Source | str) -> int:
            return (parameters[one] if isinstance(one, str) else
                    calls[one.call].outputs[one.output]).nbytes
        sources = [(one, numbers) for one, numbers in readers.items()
                   if isinstance(one, Source)]
        #: Bytes that go from before each atom to it or beyond, [atoms + 1].
        self.crossing = _spanning(self.count, [
            (atom_of[source.call], max(map(atom_of.__getitem__, numbers)),
             nbytes(source)) for source, numbers in sources])
        # Backward goes from call to call.  A gradient waits from the visit of
        # the value's last reader to that of the call that has made it.
        waits = _spanning(len(calls), [
            *((source.call, numbers[-1] - 1, nbytes(source))
              for source, numbers in sources
              if calls[source.call].outputs[source.output].wants),
            *((numbers[0] - 1, numbers[-1] - 1, nbytes(name))
              for name, numbers in readers.items() if isinstance(name, str))])
        tables = numpy.zeros([7, self.count + 1, self.count + 1], 'f')
        #: Tables of seconds; of the bytes of parameters, and of the largest
        #: of them; of bytes kept for backward, and, where gradients of weights
        #: are put off, for these; of the bytes of temporary arrays, and of
        #: gradients that wait, at the worst moment.
        (self.forward, self.backward, self.parameters, self.largest, self.kept,
         self.deferred, self.temporary) = tables
        # The tables' columns for the atom that is added, by the interval's
        # start.
        now = numpy.zeros([7, self.count + 1])
        forward, backward, used, largest, kept, put_off, temporary = now
        seen: dict[Source | str, int] = {}
        for end, atom in enumerate(atoms, 1):
            for number in atom:
                call = calls[number]
                forward[:end] += call.forward
                backward[:end] += call.backward
                kept[:end] += call.kept
                put_off[:end] += call.deferrable * sum(
                    value.nbytes for value in call.outputs.values())
                numpy.maximum(temporary[:end], call.temporary + waits[number],
                              out=temporary[:end])
                for table, things in (used, call.parameters), (
                        kept, call.retained):
                    for one in things:      # counts at its first use
                        table[seen.get(one, 0):end] += nbytes(one)
                        seen[one] = end
                for name in call.parameters:
                    numpy.maximum(largest[:end], nbytes(name),
                                  out=largest[:end])
            tables[:, :, end] = now

    def costs(self, problem: CutProblem) -> list[Costs]:
        """What each chunk takes.

        Bytes are those of parameters with gradients and the optimizer's
        state; and of activations, messages and temporary arrays, of which
        nothing is left when parameters are updated.
        """
        puts_off = problem.schedule == 'zero_bubble'
        kept = self.kept + puts_off * self.deferred
        inputs, outputs = self.crossing[:, None], self.crossing
        held = self.parameters * problem.copies
        # While the largest is updated, the allocator still has what smaller
        # ones have needed.
        update = problem.temporary * self.largest
        update += numpy.where(self.largest > HEAP_BYTES, numpy.minimum(
            update, 2 * HEAP_BYTES), 0)

        @functools.cache
        def of(live: int, recompute: str | bool) -> Costs:
            plain, short = (held + numpy.maximum(
                self.temporary + 2 * (inputs + outputs) + live * inputs
                + times * kept, update)
                for times in (live, live if puts_off else 1))
            again = (plain > problem.share if recompute == 'auto'
                     else numpy.full(plain.shape, bool(recompute)))
            return (self.forward * (1 + again) + self.backward,
                    numpy.where(again, short, plain), again)
        wanted = problem.recompute
        return list(map(of, problem.live, wanted if isinstance(wanted, tuple)
                        else itertools.repeat(wanted)))


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
    costs = intervals.costs(problem)
    edge = intervals.crossing / BANDWIDTH + (
        intervals.crossing > 0) * LATENCY
    seconds = [numpy.where(nbytes > problem.share, numpy.inf,
                           one + 2 * (edge[:, None] + edge))
               for one, nbytes, _ in costs]
    slowest, _ = _best(seconds, numpy.maximum)
    if not numpy.isfinite(slowest):
        least, _ = _best([nbytes for _, nbytes, _ in costs], numpy.maximum)
        needed = problem.overhead + problem.chunks * least
        raise DoesNotFit(
            f'no cut into {counted(problem.stages, "stage")} fits into '
            f'{size(problem.memory or 0)} per rank; the best needs '
            f'{size(needed, up=True)}, of which {size(problem.overhead)} are '
            'for code and buffers. What would help: more ranks, smaller '
            'micro-batches' + ", recompute='auto'" * (
                problem.recompute is False))
    bound = slowest * (1 + _SLACK) + 1e-12
    _, ends = _best([numpy.where(one > bound, numpy.inf, one)
                     for one in seconds], numpy.add)
    return plan_of(intervals, problem, ends)


def plan_of(intervals: Intervals, problem: CutProblem, ends: Sequence[int]
            ) -> PartitionPlan:
    """The plan of a cut, with its times, memory and messages as predicted.

    ``ends`` are the indices after the last atom of each chunk.
    """
    of_chunks = [[table[start, end].item() for table in cost]
                 for start, end, cost in zip([0, *ends[:-1]], ends,
                                             intervals.costs(problem),
                                             strict=True)]
    seconds, nbytes, again = zip(*of_chunks, strict=True)
    return PartitionPlan(
        intervals.order, tuple(intervals.starts[end] for end in ends[:-1]),
        problem.stages, again, problem.micro_batches, problem.schedule,
        seconds, tuple(problem.overhead + sum(nbytes[stage::problem.stages])
                       for stage in range(problem.stages)),
        tuple(intervals.crossing[list(ends[:-1])].tolist()))


def _best(tables: Sequence[numpy.ndarray], join: Callable
          ) -> tuple[float, tuple[int, ...]]:
    """The least joined value of all chunks, and where the chunks end."""
    first, *others = [numpy.where(numpy.tri(len(one), dtype=bool), numpy.inf,
                                  one) for one in tables]
    best, origins = first[0], []
    for table in others:            # of the first chunks up to each atom
        joined = join(best[:, None], table)
        origins.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    ends = [len(best) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return float(best[-1]), tuple(reversed(ends))


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
