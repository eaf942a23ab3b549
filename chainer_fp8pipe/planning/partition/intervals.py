"""What every interval of a model's calls would cost as a stage.

The calls are sorted by position.  Neighbours between which no cut is allowed
form an *atom*, so that an interval [i, j] is of the atoms i to j - 1.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from .backward_memory import BackwardMemory
from .calls import Call, Parameter, Source, total_seconds
from .positions import Order, Position, positions

#: More atoms than these are joined to about so many: the tables grow with
#: the square of the number, and lie in memory beside a model in training.
_ATOMS = 400


#: The allocator (glibc's) keeps what was freed of smaller arrays, and gives
#: larger ones back to the system; it keeps twice as much at most.
HEAP_BYTES = 32 << 20


class Intervals:
    """Seconds and bytes of all intervals of a trace's atoms.

    Sums are float64[atoms + 1], and element i is about the atoms before i.
    Tables are [atoms + 1, atoms + 1], and element [i, j] is about an interval,
    0 where j <= i.  Bytes are those of one micro-batch.

    Args:
        calls: Of the trace.
        order: Of the parameters.
        parameters: By path.
        like: As many calls, of the same model; their seconds decide which
            atoms are joined where there are too many.  None: ``calls``.

    Attributes:
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
        plain: The same of a pass of all by plain Chainer, beyond gradients
            of all parameters.
        update_times: Bytes that an optimizer's update of a parameter takes
            for a while, as a multiple of the parameter's; 0 unless somebody
            knows better.
        largest: Table of the bytes of the largest parameter.
        largest_in_heap: The same of those that are no larger than
            :data:`HEAP_BYTES`.
        once: bool table: whether an interval must not run forward twice.
        crossing: Bytes that go from before each atom to the atom or beyond,
            float64[atoms + 1].
        values: The number of arrays that do, float64[atoms + 1].
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Parameter],
                 like: Sequence[Call] | None = None) -> None:
        place = positions(calls, order)
        rows = sorted(range(len(calls)), key=lambda number: place[number])
        atoms = _coarse(_atoms(calls, rows, place), like or calls)
        self.starts = [place[atom[0]] for atom in atoms]
        self.count = len(atoms)
        inside = [[calls[number] for number in atom] for atom in atoms]

        def sums(cost: Callable[[Call], float]) -> numpy.ndarray:
            return _sums([sum(map(cost, atom)) for atom in inside])

        self.forward = sums(lambda call: call.forward)
        self.backward = sums(lambda call: call.backward)
        self.weights = sums(lambda call: call.backward * call.deferrable)
        self.deferred = _between(sums(lambda call: call.deferred))
        self.once = _between(sums(lambda call: call.once)) > 0
        atom_of = {number: index for index, atom in enumerate(atoms)
                   for number in atom}
        back = BackwardMemory(calls, atom_of, parameters)
        self.temporary = back.table(self.count)
        self.plain = numpy.asarray(back.plain())
        sizes = [[parameters[name].nbytes for call in atom
                  for name in call.parameters if name in parameters]
                 for atom in inside]
        self.largest = _maxima([max(of, default=0) for of in sizes])
        self.largest_in_heap = _maxima([max(
            (size for size in of if size <= HEAP_BYTES), default=0)
            for of in sizes])
        self.update_times = 0.0
        self.parameters = self._unions(
            [[(name, parameters[name].nbytes) for call in atom
              for name in call.parameters if name in parameters]
             for atom in inside])
        self.kept = self._unions(
            [[(source, calls[source.call].outputs[source.output].nbytes)
              for call in atom for source in call.retained]
             for atom in inside]) + _between(sums(lambda call: call.kept))
        self.crossing, self.values = self._crossing(calls, atom_of)

    def seconds(self) -> numpy.ndarray:
        """Table of the seconds of forward and backward passes."""
        return _between(self.forward + self.backward)

    def updating(self, largest: Any, in_heap: Any) -> Any:
        """Bytes of temporary arrays while an optimizer updates parameters.

        While the largest is updated, what the largest of those in the heap
        has needed is still there.

        Args:
            largest: Bytes of the largest parameter, a number or a table.
            in_heap: Of the largest that is no larger than
                :data:`HEAP_BYTES`.
        """
        times = self.update_times
        return times * largest + numpy.where(
            largest > HEAP_BYTES,
            numpy.minimum(times * in_heap, 2 * HEAP_BYTES), 0)

    def _unions(self, used: list[list[tuple]]) -> numpy.ndarray:
        """Table of the bytes of the different things that atoms use.

        ``used`` has, for each atom, the things and their bytes.
        """
        total = numpy.zeros((self.count + 1, self.count + 1), 'f')
        at = numpy.zeros(self.count + 1)
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

    def _crossing(self, calls: Sequence[Call], atom_of: Mapping[int, int]
                  ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Bytes and numbers of the values made before an atom, used later."""
        until: dict[Source, int] = {}
        for number, call in enumerate(calls):
            for source in call.inputs:
                until[source] = max(until.get(source, 0), atom_of[number])
        nbytes = numpy.zeros(self.count + 2)
        values = numpy.zeros(self.count + 2)
        for source, end in until.items():
            start = atom_of[source.call] + 1
            if start <= end:
                size = calls[source.call].outputs[source.output].nbytes
                nbytes[start] += size
                nbytes[end + 1] -= size
                values[start] += 1
                values[end + 1] -= 1
        return nbytes.cumsum()[:-1], values.cumsum()[:-1]


def _atoms(calls: Sequence[Call], rows: Sequence[int],
           place: Sequence[Position]) -> list[list[int]]:
    """Numbers of the calls of each atom, in the order of positions."""
    loops = _loops(calls, place)
    together = _together(calls, rows)
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
    enough = total_seconds(calls) / _ATOMS
    joined: list[list[int]] = []
    seconds = enough
    for atom in atoms:
        if seconds >= enough:
            joined.append([])
            seconds = 0.0
        joined[-1] += atom
        seconds += total_seconds([calls[number] for number in atom])
    return joined


def _loops(calls: Sequence[Call], place: Sequence[Position]) -> set[int]:
    """Places whose parameters several calls use, one after the other.

    A depth there is a step of a loop; other batches may have more steps.
    """
    return {here.place for call, here in zip(calls, place, strict=True)
            if call.parameters and here.depth and here.place == max(
                place[source.call].place for source in call.inputs)
            and any(not set(call.parameters).isdisjoint(other.parameters)
                    for other, position in zip(calls, place, strict=True)
                    if other is not call and position.place == here.place)}


def _together(calls: Sequence[Call], rows: Sequence[int]) -> set[int]:
    """Rows before which no cut is allowed: inside of a link to be whole."""
    spans: dict[str, list[int]] = {}
    for index, number in enumerate(rows):
        for name in calls[number].whole:
            spans.setdefault(name, [index, index])[1] = index
    return {index for first, last in spans.values()
            for index in range(first + 1, last + 1)}


def _sums(values: Sequence[float]) -> numpy.ndarray:
    return numpy.concatenate([[0.0], numpy.cumsum(values, dtype=float)])


def _between(sums: numpy.ndarray) -> numpy.ndarray:
    return numpy.triu(sums[None, :] - sums[:, None]).astype('f')


def _maxima(values: Sequence[float]) -> numpy.ndarray:
    """Table of the largest value in each interval."""
    count = len(values)
    found = numpy.zeros((count + 1, count + 1), 'f')
    for start in range(count):
        found[start, start + 1:] = numpy.maximum.accumulate(values[start:])
    return found
