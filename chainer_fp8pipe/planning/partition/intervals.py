"""What every interval of a model's calls would cost as a stage.

Calls are in the order of their positions.  Those between which no cut can be
are one *atom*.  Arrays are float64[atoms + 1, atoms + 1]; element [i, j] is
about the atoms i to j - 1, and 0 where there are none.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

from .calls import Call, Parameter, Source, total_seconds
from .positions import Order, Position, positions

#: More atoms are joined to about so many, each a small part of a step.  The
#: tables take memory with the square of it, beside a model in training.
_ATOMS = 400


class Intervals:
    """Seconds and bytes of all intervals of a trace's atoms.

    Args:
        calls: Of the trace.
        order: Of the parameters.
        parameters: By path.

    Attributes:
        starts: The position of each atom's first call.
        forward: Seconds of a forward pass, float64[atoms + 1]: sums up to an
            atom.
        backward: The same of a backward pass.
        weights: What of it is for the gradients of weights alone.
        parameters: Bytes of the parameters in each interval.
        kept: Bytes that a micro-batch keeps for backward in each interval.
        deferred: Bytes that wait for the gradients of weights where these
            are put off, per micro-batch in each interval.
        temporary: Bytes of the largest temporaries in each interval.
        once: Whether an interval must not run forward twice.
        crossing: Bytes that cross before each atom, float64[atoms + 1].
        values: How many arrays cross before each atom, float64[atoms + 1].
        count: How many atoms there are.
    """

    def __init__(self, calls: Sequence[Call], order: Order,
                 parameters: Mapping[str, Parameter]) -> None:
        place = positions(calls, order)
        rows = sorted(range(len(calls)), key=lambda number: place[number])
        atoms = _coarse(_atoms(calls, rows, place), calls)
        self.starts = [place[atom[0]] for atom in atoms]
        self.count = len(atoms)
        atom_of = {number: index for index, atom in enumerate(atoms)
                   for number in atom}
        self.forward = _sums([sum(calls[number].forward for number in atom)
                              for atom in atoms])
        self.backward = _sums([sum(calls[number].backward for number in atom)
                               for atom in atoms])
        self.weights = _sums([sum(
            calls[number].backward * calls[number].deferrable
            for number in atom) for atom in atoms])
        self.deferred = _between(_sums([sum(
            calls[number].deferred for number in atom) for atom in atoms]))
        self.parameters = self._unions(
            [[(name, parameters[name].nbytes) for number in atom
              for name in calls[number].parameters if name in parameters]
             for atom in atoms])
        own = self._unions(
            [[(source, calls[source.call].outputs[source.output].nbytes)
              for number in atom for source in calls[number].retained]
             for atom in atoms])
        inside = _sums([sum(calls[number].kept for number in atom)
                        for atom in atoms])
        self.kept = own + _between(inside)
        self.temporary = _maxima([max(calls[number].temporary
                                      for number in atom) for atom in atoms])
        self.once = _between(_sums([
            any(calls[number].once for number in atom)
            for atom in atoms])) > 0
        self.crossing, self.values = self._crossing(calls, atom_of)

    def seconds(self) -> numpy.ndarray:
        """Forward and backward of every interval."""
        return _between(self.forward + self.backward)

    def _unions(self, used: list[list[tuple]]) -> numpy.ndarray:
        """Bytes of the different things that each interval uses.

        Args:
            used: For each atom the things, with their bytes.
        """
        total = numpy.zeros((self.count + 1, self.count + 1), 'f')
        at = numpy.zeros(self.count + 1)
        last: dict = {}
        for index, things in enumerate(used):
            for thing, nbytes in things:
                # An interval that ends here has a thing if it begins no
                # later than at the thing's last use.
                if thing in last:
                    at[last[thing]] -= nbytes
                last[thing] = index
                at[index] += nbytes
            total[:, index + 1] = at[::-1].cumsum()[::-1]
        return numpy.triu(total)

    def _crossing(self, calls: Sequence[Call], atom_of: Mapping[int, int]
                  ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """What is made before an atom and used there or after it."""
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
    """Calls between which no cut can be, in the order of positions."""
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
    """Joins neighbours that are short, where there are very many."""
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
    """Places whose parameters are used again on the way from themselves.

    A depth there is a step of a loop, of which others may have more.
    """
    return {here.place for call, here in zip(calls, place, strict=True)
            if call.parameters and here.depth and here.place == max(
                place[source.call].place for source in call.inputs)
            and _uses_place(call, calls, place, here.place)}


def _uses_place(call: Call, calls: Sequence[Call],
                place: Sequence[Position], number: int) -> bool:
    names = set(call.parameters)
    return any(names.intersection(other.parameters)
               for other, position in zip(calls, place, strict=True)
               if other is not call and position.place == number)


def _together(calls: Sequence[Call], rows: Sequence[int]) -> set[int]:
    """Where no cut can be because a link's calls must not be apart."""
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
    """The largest value of each interval."""
    count = len(values)
    found = numpy.zeros((count + 1, count + 1), 'f')
    for start in range(count):
        found[start, start + 1:] = numpy.maximum.accumulate(values[start:])
    return found
