"""Where to cut a model: the shortest step under a memory limit."""
# Calls are sorted by position.  Neighbours between which no cut is allowed
# form an *atom*; a chunk is an interval [i, j] of the atoms i to j - 1.  All
# intervals are weighed at once (`Intervals`): what adds up, by sums up to each
# atom; the rest by tables.  Dynamic programming over these finds the cut whose
# slowest chunk is fastest, and of cuts nearly as good the one that moves the
# fewest bytes.  Where activations do not fit, a chunk keeps its inputs only
# and runs forward twice.  After Tanaka et al., "Automatic Graph Partitioning
# for Very Large-scale Deep Learning" (RaNNC, IPDPS 2021), section IV, where
# operations are joined to blocks first.
#
# Only the number of micro-batches that are live tells chunks of a cut apart,
# so there is a table of seconds for each such number: infinite where an
# interval is empty or needs too much memory.  Memory is a promise: no plan is
# made whose fullest rank needs more than the limit.  Each chunk of a rank gets
# an equal share of it, which refuses some cuts that would fit; with one chunk
# a rank, the usual case, none.
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ..pipeline.schedules import Kind, make_schedule
from ..report.quantities import counted, size
from .calls import Call, Order, Position, Source, Value, positions
from .plan import Cut, PartitionPlan, Predicted

#: More atoms than these are joined, as tables grow with their number squared.
_ATOMS = 400
#: By how much the slowest chunk may be slower if fewer bytes cross then.
_SLACK = 0.02
#: The allocator (glibc's) keeps what was freed of smaller arrays, and gives
#: larger ones back to the system; it keeps twice as much at most.
HEAP_BYTES = 32 << 20


class DoesNotFit(ValueError):
    """No cut fits into the memory of the ranks."""


class Wire(NamedTuple):
    """Between two ranks: n bytes take ``latency + n / bandwidth`` seconds."""

    latency: float
    bandwidth: float


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
    wire: Wire = Wire(1e-4, 2e9)    # a message's, packing included
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


class Intervals:
    """Seconds and bytes of all intervals of a program's atoms.

    Sums are float64[atoms + 1], and element i is about the atoms before i.
    Tables are [atoms + 1, atoms + 1], and element [i, j] is about an interval,
    0 where j <= i.  Bytes are those of one micro-batch.

    Args:
        calls: Of the program.
        order: Of the parameters.
        parameters: By path.
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Value]) -> None:
        place = positions(calls, order)
        fine = _atoms(calls, place)
        size = max(1, -(-len(fine) // _ATOMS))
        atoms = [sum(fine[start:start + size], [])
                 for start in range(0, len(fine), size)]
        self.order = order
        #: The position of each atom's first call.
        self.starts = [place[atom[0]] for atom in atoms]
        atom_of = numpy.zeros(len(calls), int)
        for index, atom in enumerate(atoms):
            atom_of[atom] = index

        def sums(cost: Callable[[Call], float]) -> numpy.ndarray:
            each = numpy.bincount(atom_of, list(map(cost, calls)), len(atoms))
            return numpy.concatenate([[0.0], each.cumsum()])

        def nbytes(source: Source) -> int:
            return calls[source.call].outputs[source.output].nbytes
        inputs, read = (_readers(calls, what)
                        for what in ('inputs', 'parameters'))
        #: Sums of seconds.
        self.forward = sums(lambda call: call.forward)
        self.backward = sums(lambda call: call.backward)
        #: Table of bytes kept for gradients of weights that are put off.
        self.deferred = _between(sums(lambda call: call.deferrable and sum(
            value.nbytes for value in call.outputs.values())))
        #: bool table: whether an interval must not run forward twice.
        self.once = _between(sums(lambda call: call.once)) > 0
        used = [[(name, parameters[name].nbytes) for number in atom
                 for name in calls[number].parameters if name in parameters]
                for atom in atoms]
        #: Table of the bytes of parameters.
        self.parameters = _unions(used)
        #: Tables of the largest parameter's bytes, and those of the largest
        #: that is no larger than :data:`HEAP_BYTES`.
        self.largest = [_maxima([max(
            (nbytes for _, nbytes in of if nbytes <= limit), default=0)
            for of in used]) for limit in (numpy.inf, HEAP_BYTES)]
        #: Table of bytes kept for backward.
        self.kept = _unions([[
            (source, nbytes(source)) for number in atom
            for source in calls[number].retained] for atom in atoms]
        ) + _between(sums(lambda call: call.kept))
        #: Bytes that go from before each atom to it or beyond, [atoms + 1].
        self.crossing = _spanning(len(atoms), [
            (atom_of[source.call], max(atom_of[numbers]), nbytes(source))
            for source, numbers in inputs.items()])
        # Backward goes from call to call.  A gradient waits from the visit of
        # the value's last reader to that of the call that has made it.
        waits = _spanning(len(calls), [
            *((source.call, numbers[-1] - 1, nbytes(source))
              for source, numbers in inputs.items()
              if calls[source.call].outputs[source.output].wants),
            *((numbers[0] - 1, numbers[-1] - 1, parameters[name].nbytes)
              for name, numbers in read.items() if name in parameters)])
        #: Table of the bytes of temporary arrays, and of gradients that wait,
        #: at the worst moment.
        self.temporary = _maxima([max(
            calls[number].temporary + waits[number] for number in atom)
            for atom in atoms])

    @property
    def count(self) -> int:
        """How many atoms there are."""
        return len(self.starts)

    def ends_of(self, cuts: Sequence[Position]) -> tuple[int, ...]:
        """Index after the last atom of each chunk, for a plan's cuts."""
        return (*(sum(start < cut for start in self.starts) for cut in cuts),
                self.count)

    def updating(self, start: Any, end: Any, times: float) -> Any:
        """Bytes of temporary arrays while an optimizer updates parameters.

        Args:
            start: First atom.
            end: Index after the last one.
            times: The most that an update of a parameter takes for a while,
                as a multiple of the parameter's bytes.
        """
        # While the largest is updated, what the largest of those in the heap
        # has needed is still there.
        largest, in_heap = (table[start, end] for table in self.largest)
        return times * largest + numpy.where(
            largest > HEAP_BYTES,
            numpy.minimum(times * in_heap, 2 * HEAP_BYTES), 0)


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
    edge = (intervals.crossing / problem.wire.bandwidth
            + (intervals.crossing > 0) * problem.wire.latency)
    traffic = edge[:, None] + edge[None, :]
    plain = _between(intervals.forward + intervals.backward) + 2 * traffic
    again = numpy.where(intervals.once, 0.0, _between(intervals.forward))

    def seconds(live: int) -> numpy.ndarray:
        return numpy.min([
            numpy.where(_bytes(intervals, problem, live, repeats)
                        > problem.share, numpy.inf, plain + repeats * again)
            for repeats in problem.repeats[:1 if problem.memory is None
                                           else None]], axis=0)
    costs = _of_chunks(problem, seconds)
    slowest, _ = _best(costs, numpy.maximum)
    if not numpy.isfinite(slowest):
        raise DoesNotFit(_why(intervals, problem))
    bound = slowest * (1 + _SLACK) + 1e-12
    _, ends = _best([numpy.where(cost > bound, numpy.inf,
                                 traffic + cost * 1e-6) for cost in costs],
                    numpy.add)
    return plan_of(intervals, problem, ends)


def plan_of(intervals: Intervals, problem: CutProblem, ends: Sequence[int]
            ) -> PartitionPlan:
    """The plan of a cut, with its step, memory and messages as predicted.

    Args:
        intervals: Of the model.
        problem: With as many chunks as there are ends.
        ends: Index after the last atom of each chunk.
    """
    again, memory = rank_bytes(intervals, problem, ends)
    forward, backward = (numpy.diff(sums[[0, *ends]]) for sums in (
        intervals.forward, intervals.backward))
    busy = forward * (1 + numpy.array(again)) + backward
    ranks = busy.reshape(-1, problem.stages).sum(axis=0)
    crossing = tuple(float(intervals.crossing[end]) for end in ends[:-1])
    # The slowest rank's work, and its bubble: a micro-batch goes through the
    # other ranks, and between all of them.
    bubble = ranks.sum() - ranks.max() + 2 * sum(
        problem.wire.latency + nbytes / problem.wire.bandwidth
        for nbytes in crossing)
    return PartitionPlan(
        intervals.order, tuple(Cut.at(
            intervals.order, intervals.starts[end]) for end in ends[:-1]),
        problem.stages, again, problem.micro_batches, problem.schedule,
        Predicted(float(problem.micro_batches * ranks.max()
                        + bubble / problem.chunks),
                  tuple(busy.tolist()), memory, crossing))


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
        again.append(bool(recompute[chunk] if recompute else (
            not intervals.once[start, end] and True in problem.repeats
            and (problem.recompute is True or plain > problem.share))))
        memory[chunk % problem.stages] += short if again[-1] else plain
    return tuple(again), tuple(memory)


def least_memory(intervals: Intervals, problem: CutProblem) -> float:
    """The smallest limit under which there is a cut, in bytes."""
    least, _ = _best(_of_chunks(problem, lambda live: numpy.min([
        _bytes(intervals, problem, live, repeats)
        for repeats in problem.repeats], axis=0)), numpy.maximum)
    return problem.overhead + problem.chunks * least


def _of_chunks(problem: CutProblem, table: Callable[[int], numpy.ndarray]
               ) -> list[numpy.ndarray]:
    """The table of each chunk, infinite for intervals without atoms."""
    tables = {live: table(live) for live in set(problem.live())}
    for one in tables.values():
        one[numpy.tri(len(one), dtype=bool)] = numpy.inf
    return [tables[live] for live in problem.live()]


def _best(tables: Sequence[numpy.ndarray], join: Callable
          ) -> tuple[float, tuple[int, ...]]:
    """The least joined value of all chunks, and where the chunks end."""
    best, origins = tables[0][0], []    # of the first chunks up to each atom
    for table in tables[1:]:
        joined = join(best[:, None], table)
        origins.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    ends = [len(best) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return float(best[-1]), tuple(reversed(ends))


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
    text = (f'no cut into {counted(problem.stages, "stage")} fits into '
            f'{size(problem.memory)} per rank; the best needs '
            f'{size(needed, up=True)}, '
            f'{size(needed - problem.memory, up=True)} more. ')
    if problem.memory <= problem.overhead:
        return (f'{text}A rank takes {size(problem.overhead)} for '
                'code and buffers, whatever the model is; raise the limit')
    return text + ('What would help: more ranks, smaller micro-batches'
                   + ", recompute='auto'" * (problem.recompute is False))


# --- atoms ------------------------------------------------------------------

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
    loops = _loops(calls, place)
    atoms: list[list[int]] = []
    for index, number in enumerate(rows):
        here = place[number]
        if index and (here == place[rows[index - 1]] or index in together
                      or (here.depth and here.place in loops)):
            atoms[-1].append(number)
        else:
            atoms.append([number])
    return atoms


def _loops(calls: Sequence[Call], place: Sequence[Position]) -> set[int]:
    """Places whose parameters several calls use, one after the other.

    A depth there is a step of a loop; other batches may have more steps.
    """
    readers = _readers(calls, 'parameters')
    return {here.place for call, here in zip(calls, place, strict=True)
            if here.depth and any(sum(
                place[number].place == here.place
                for number in readers[name]) > 1 for name in call.parameters)
            and here.place == max(place[source.call].place
                                  for source in call.inputs)}


def _readers(calls: Sequence[Call], what: str) -> dict[Any, list[int]]:
    """Numbers of the calls that have each of their inputs or parameters."""
    found: dict[Any, list[int]] = {}
    for number, call in enumerate(calls):
        for one in dict.fromkeys(getattr(call, what)):
            found.setdefault(one, []).append(number)
    return found


# --- tables -----------------------------------------------------------------

def _between(sums: numpy.ndarray) -> numpy.ndarray:
    return numpy.triu(sums[None, :] - sums[:, None]).astype('f')


def _maxima(values: Sequence[float]) -> numpy.ndarray:
    """Table of the largest value in each interval."""
    found = numpy.zeros((len(values) + 1, len(values) + 1), 'f')
    for start in range(len(values)):
        found[start, start + 1:] = numpy.maximum.accumulate(values[start:])
    return found


def _unions(used: list[list[tuple]]) -> numpy.ndarray:
    """Table of the bytes of the different things that atoms use.

    ``used`` has, for each atom, the things and their bytes.
    """
    total = numpy.zeros((len(used) + 1, len(used) + 1), 'f')
    at = numpy.zeros(len(used) + 1)
    last: dict = {}
    for index, things in enumerate(used):
        for thing, nbytes in things:
            # An interval that ends here contains a thing if the interval
            # begins no later than at the thing's last use.
            if thing in last:
                at[last[thing]] -= nbytes
            last[thing] = index
            at[index] += nbytes
        total[:, index + 1] = at[::-1].cumsum()[::-1]
    return numpy.triu(total)


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
