"""What every interval of a model's calls would cost as a stage."""
# The calls are sorted by position.  Neighbours between which no cut is allowed
# form an *atom*, so that an interval [i, j] is of the atoms i to j - 1.  All
# intervals are weighed at once, as a search asks for any of them: seconds and
# bytes that add up are sums up to each atom, the others are tables.
#
# What a pass back needs beside what is kept is the hardest to know.  A chunk
# visits its calls in the reverse of their order, so that the gradient of a
# value waits from the visit of its last reader to that of the call that has
# made it.
from __future__ import annotations

import itertools
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import numpy

from .calls import Call, Order, Position, Value, positions

#: More atoms than these are joined to about so many: the tables grow with
#: the square of the number, and lie in memory beside a model in training.
_ATOMS = 400
#: The allocator (glibc's) keeps what was freed of smaller arrays, and gives
#: larger ones back to the system; it keeps twice as much at most.
HEAP_BYTES = 32 << 20


class Intervals:
    """Seconds and bytes of all intervals of a program's atoms.

    Sums are float64[atoms + 1], and element i is about the atoms before i.
    Tables are [atoms + 1, atoms + 1], and element [i, j] is about an interval,
    0 where j <= i.  Bytes are those of one micro-batch.

    Args:
        calls: Of the program.
        order: Of the parameters.
        parameters: By path.

    Attributes:
        order: As given.
        starts: The position of each atom's first call.
        count: How many atoms there are.
        forward: Sums of seconds of forward passes.
        backward: Sums of seconds of backward passes.
        weights: Of these, the seconds for gradients of weights alone.
        parameters: Table of the bytes of parameters.
        kept: Table of the bytes that are kept for backward.
        deferred: Table of the bytes kept for gradients of weights, where
            these are put off.
        temporary: Table of the bytes of temporary arrays, and of gradients
            that wait, at the worst moment.
        largest: Table of the bytes of the largest parameter.
        largest_in_heap: The same of those that are no larger than
            :data:`HEAP_BYTES`.
        once: bool table: whether an interval must not run forward twice.
        crossing: Bytes that go from before each atom to the atom or beyond,
            float64[atoms + 1].
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Value]) -> None:
        place = positions(calls, order)
        atoms = _coarse(_atoms(calls, place), calls)
        self.order, self.count = order, len(atoms)
        self.starts = [place[atom[0]] for atom in atoms]
        inside = [[calls[number] for number in atom] for atom in atoms]
        atom_of = [0] * len(calls)
        for index, atom in enumerate(atoms):
            for number in atom:
                atom_of[number] = index

        def sums(cost: Callable[[Call], float]) -> numpy.ndarray:
            return numpy.concatenate([[0.0], numpy.cumsum(
                [sum(map(cost, atom)) for atom in inside], dtype=float)])
        self.forward = sums(lambda call: call.forward)
        self.backward = sums(lambda call: call.backward)
        self.weights = sums(lambda call: call.backward * call.deferrable)
        self.deferred = _between(sums(lambda call: call.deferred))
        self.once = _between(sums(lambda call: call.once)) > 0
        self.temporary = _backward_bytes(calls, atom_of, self.count,
                                         parameters)
        used = [[(name, parameters[name].nbytes) for call in atom
                 for name in call.parameters if name in parameters]
                for atom in inside]
        self.parameters = _unions(used)
        self.largest, self.largest_in_heap = (_maxima([max(
            (size for _, size in of if size <= limit), default=0)
            for of in used]) for limit in (numpy.inf, HEAP_BYTES))
        self.kept = _unions(
            [[(source, calls[source.call].outputs[source.output].nbytes)
              for call in atom for source in call.retained]
             for atom in inside]) + _between(sums(lambda call: call.kept))
        self.crossing = _crossing(calls, atom_of, self.count)

    def seconds(self) -> numpy.ndarray:
        """Table of the seconds of forward and backward passes."""
        return _between(self.forward + self.backward)

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
        largest = self.largest[start, end]
        return times * largest + numpy.where(
            largest > HEAP_BYTES, numpy.minimum(
                times * self.largest_in_heap[start, end], 2 * HEAP_BYTES), 0)


# --- atoms ------------------------------------------------------------------

def _atoms(calls: Sequence[Call], place: Sequence[Position]
           ) -> list[list[int]]:
    """Numbers of the calls of each atom, in the order of positions."""
    rows = sorted(range(len(calls)), key=lambda number: place[number])
    loops, together = _loops(calls, place), _together(calls, rows)
    atoms: list[list[int]] = []
    for index, number in enumerate(rows):
        here = place[number]
        if (atoms and (here == place[rows[index - 1]]
                       or (here.depth and here.place in loops)
                       or index in together)):
            atoms[-1].append(number)
        else:
            atoms.append([number])
    return atoms


def _coarse(atoms: list[list[int]], calls: Sequence[Call]
            ) -> list[list[int]]:
    """Joins short neighbours where there are very many atoms."""
    if len(atoms) <= _ATOMS:
        return atoms
    enough = sum(call.seconds for call in calls) / _ATOMS
    joined: list[list[int]] = []
    seconds = enough
    for atom in atoms:
        if seconds >= enough:
            joined.append([])
            seconds = 0.0
        joined[-1] += atom
        seconds += sum(calls[number].seconds for number in atom)
    return joined


def _loops(calls: Sequence[Call], place: Sequence[Position]) -> set[int]:
    """Places whose parameters several calls use, one after the other.

    A depth there is a step of a loop; other batches may have more steps.
    """
    readers: dict[tuple[int, str], int] = {}
    for call, here in zip(calls, place, strict=True):
        for name in set(call.parameters):
            key = here.place, name
            readers[key] = readers.get(key, 0) + 1
    return {here.place for call, here in zip(calls, place, strict=True)
            if here.depth and any(readers[here.place, name] > 1
                                  for name in call.parameters)
            and here.place == max(place[source.call].place
                                  for source in call.inputs)}


def _together(calls: Sequence[Call], rows: Sequence[int]) -> set[int]:
    """Rows before which no cut is allowed: inside of a link to be whole."""
    spans: dict[str, list[int]] = {}
    for index, number in enumerate(rows):
        for name in calls[number].whole:
            spans.setdefault(name, [index, index])[1] = index
    return {index for first, last in spans.values()
            for index in range(first + 1, last + 1)}


# --- tables -----------------------------------------------------------------

def _between(sums: numpy.ndarray) -> numpy.ndarray:
    return numpy.triu(sums[None, :] - sums[:, None]).astype('f')


def _maxima(values: Sequence[float]) -> numpy.ndarray:
    """Table of the largest value in each interval."""
    count = len(values)
    found = numpy.zeros((count + 1, count + 1), 'f')
    for start in range(count):
        found[start, start + 1:] = numpy.maximum.accumulate(values[start:])
    return found


def _unions(used: list[list[tuple]]) -> numpy.ndarray:
    """Table of the bytes of the different things that atoms use.

    ``used`` has, for each atom, the things and their bytes.
    """
    count = len(used)
    total = numpy.zeros((count + 1, count + 1), 'f')
    at = numpy.zeros(count + 1)
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


def _crossing(calls: Sequence[Call], atom_of: Sequence[int], count: int
              ) -> numpy.ndarray:
    """Bytes of the values made before an atom, used later."""
    changes = numpy.zeros(count + 2)
    for source, numbers in _uses(
            (number, source) for number, call in enumerate(calls)
            for source in call.inputs).items():
        start = atom_of[source.call] + 1
        end = max(map(atom_of.__getitem__, numbers))
        if start <= end:
            nbytes = calls[source.call].outputs[source.output].nbytes
            changes[start] += nbytes
            changes[end + 1] -= nbytes
    return changes.cumsum()[:-1]


# --- memory of a pass back --------------------------------------------------

def _backward_bytes(calls: Sequence[Call], atom_of: Sequence[int], count: int,
                    parameters: Mapping[str, Value]) -> numpy.ndarray:
    """Table of bytes at the worst moment of a pass back, beside what is kept.
    """
    visits = range(len(calls))[::-1]
    temporary, atoms = numpy.zeros(len(calls)), numpy.empty(len(calls), int)
    temporary[list(visits)] = [call.temporary for call in calls]
    atoms[list(visits)] = atom_of
    uses = _uses((number, name) for number, call in enumerate(calls)
                 for name in call.parameters if name in parameters)
    waits: list[list[_Wait]] = [[] for _ in range(count)]
    for wait in (*_of_values(calls, visits, atom_of),
                 *_of_parameters(uses, parameters, visits, atom_of)):
        waits[wait[0]].append(wait)
    # Visits in the order of their atoms, so that those of an interval that
    # begins further on are the last ones.
    columns = numpy.argsort(atoms, kind='stable')
    begins = numpy.searchsorted(atoms[columns], numpy.arange(count))
    needed = numpy.where(
        atoms[columns] < numpy.arange(count + 1)[:, None],
        temporary.astype('f')[columns], numpy.float32(-numpy.inf))
    found = numpy.zeros((count + 1, count + 1), 'f')
    for first in reversed(range(count)):
        for _, last, start, end, nbytes in waits[first]:
            needed[last + 1:, (start < columns) & (columns < end)] += nbytes
        found[first, first + 1:] = needed[first + 1:, begins[first]:].max(
            axis=1, initial=0.0)
    return found


#: A gradient that waits between two visits: the atoms of the calls that are
#: visited, as it waits in intervals that contain both; the visit that makes
#: it; the one after the last during which it waits; its bytes.
_Wait = tuple[int, int, int, int, int]


def _uses(pairs: Iterable[tuple[int, Any]]) -> dict[Any, list[int]]:
    """Numbers of the calls that use a thing."""
    found: dict[Any, list[int]] = {}
    for number, thing in pairs:
        found.setdefault(thing, []).append(number)
    return found


def _of_values(calls: Sequence[Call], visits: Sequence[int],
               atom_of: Sequence[int]) -> Iterator[_Wait]:
    """Until the function that has made the value is visited.

    Its own gradients are among the function's temporary arrays.
    """
    for source, numbers in _uses(
            (number, source) for number, call in enumerate(calls)
            for source in dict.fromkeys(call.inputs)
            if calls[source.call].outputs[source.output].wants).items():
        value = calls[source.call].outputs[source.output]
        end = visits[source.call]
        # An interval may lack the readers that are visited first.
        for number in sorted(numbers, key=atom_of.__getitem__):
            start = visits[number]
            if start + 1 < end:
                yield (atom_of[source.call], atom_of[number], start, end,
                       value.nbytes)
            end = min(start + 1, end)


def _of_parameters(uses: Mapping[str, list[int]],
                   parameters: Mapping[str, Value], visits: Sequence[int],
                   atom_of: Sequence[int]) -> Iterator[_Wait]:
    """From the first visit of a reader to the end of the last one's."""
    for name, numbers in uses.items():
        numbers = sorted(numbers, key=lambda number: (
            atom_of[number], -visits[number]))
        for one, other in itertools.pairwise(numbers):
            start, end = sorted((visits[one], visits[other]))
            yield (atom_of[one], atom_of[other], start, end + 1,
                   parameters[name].nbytes)
