"""Bytes in use at the worst moment of a pass back, beside what is kept.

Functions are visited by their rank, the longest way from an input, and not in
the reverse order of the calls (Chainer 7.8.1, chainer/_backprop.py).  So the
gradient of a value waits from the visit of the first function that has read
the value to that of the function that has made the value: in a recurrent
network, the gradients of all steps' weights wait for the end.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from .calls import Call, Parameter, Source


class _Wait(NamedTuple):
    """A gradient waits between two visits.

    Attributes:
        first, last: Atoms of the calls that are visited; the gradient waits
            in intervals that contain both.
        start: The visit that makes the gradient.
        end: The visit after the last one during which the gradient waits.
        nbytes: Of the gradient.
    """

    first: int
    last: int
    start: int
    end: int
    nbytes: int


class BackwardMemory:
    """What a pass back through a trace's atoms needs.

    Args:
        calls: Of the trace.
        atom_of: The atom of each call, by number.
        parameters: By path.
    """

    def __init__(self, calls: Sequence[Call], atom_of: Mapping[int, int],
                 parameters: Mapping[str, Parameter]) -> None:
        self._calls, self._parameters = calls, parameters
        self._atoms = [atom_of[number] for number in range(len(calls))]
        self._visits = _visits(calls)
        self._temporary = numpy.zeros(len(calls), 'f')
        for call, visit in zip(calls, self._visits, strict=True):
            self._temporary[visit] = call.temporary
        self._uses: dict[str, list[int]] = {}
        for number, call in enumerate(calls):
            for name in call.parameters:
                if name in parameters:
                    self._uses.setdefault(name, []).append(number)
        self._waits = [*self._of_values(), *self._of_parameters()]

    def table(self, count: int) -> numpy.ndarray:
        """Bytes at the worst moment of each interval of atoms.

        Args:
            count: Of the atoms.

        Returns:
            float32[count + 1, count + 1]; 0 where an interval has no atom.
        """
        # Visits in the order of their atoms, so that those of an interval
        # that begins further on are the last ones.
        atoms = numpy.empty(len(self._calls), int)
        atoms[self._visits] = self._atoms
        columns = numpy.argsort(atoms, kind='stable')
        needed = numpy.where(
            atoms[columns] < numpy.arange(count + 1)[:, None],
            self._temporary[columns], numpy.float32(-numpy.inf))
        begins = numpy.searchsorted(atoms[columns], numpy.arange(count))
        waits: list[list[_Wait]] = [[] for _ in range(count)]
        for wait in self._waits:
            waits[wait.first].append(wait)
        found = numpy.zeros((count + 1, count + 1), 'f')
        for first in reversed(range(count)):
            for wait in waits[first]:
                between = (wait.start < columns) & (columns < wait.end)
                needed[wait.last + 1:, between] += wait.nbytes
            found[first, first + 1:] = needed[first + 1:, begins[first]:].max(
                axis=1, initial=0.0)
        return found

    def plain(self) -> float:
        """Bytes of a pass of all calls, beyond gradients of all parameters.

        Plain Chainer drops gradients before each pass back, so they are not
        all there at its worst moment.
        """
        now = self._temporary.astype(float)
        for wait in self._waits:
            now[wait.start + 1:wait.end] += wait.nbytes
        for name, numbers in self._uses.items():
            first = min(self._visits[number] for number in numbers)
            now[:first + 1] -= self._parameters[name].nbytes
        return float(now.max(initial=0.0))

    # --- what waits ----------------------------------------------------------

    def _of_values(self) -> Iterator[_Wait]:
        """Until the function that has made the value is visited.

        Its own gradients are among the function's temporary arrays.
        """
        readers: dict[Source, list[int]] = {}
        for number, call in enumerate(self._calls):
            for source in dict.fromkeys(call.inputs):
                if self._calls[source.call].outputs[source.output].wants:
                    readers.setdefault(source, []).append(number)
        for source, numbers in readers.items():
            value = self._calls[source.call].outputs[source.output]
            end = self._visits[source.call]
            # An interval may lack the readers that are visited first.
            for number in sorted(numbers, key=self._atoms.__getitem__):
                start = self._visits[number]
                if start + 1 < end:
                    yield _Wait(self._atoms[source.call], self._atoms[number],
                                start, end, value.nbytes)
                end = min(start + 1, end)

    def _of_parameters(self) -> Iterator[_Wait]:
        """From the first visit of a reader to the end of the last one's."""
        for name, numbers in self._uses.items():
            uses = sorted(numbers, key=lambda number: (
                self._atoms[number], -self._visits[number]))
            for one, other in itertools.pairwise(uses):
                start, end = sorted((self._visits[one], self._visits[other]))
                yield _Wait(self._atoms[one], self._atoms[other], start,
                            end + 1, self._parameters[name].nbytes)


def _visits(calls: Sequence[Call]) -> list[int]:
    """Of each call: as which one a pass back visits it."""
    ranks: list[int] = []
    for call in calls:
        ranks.append(max((ranks[source.call] + 1 for source in call.inputs),
                         default=0))
    order = sorted(range(len(calls)), key=lambda one: (-ranks[one], -one))
    found = [0] * len(calls)
    for visit, number in enumerate(order):
        found[number] = visit
    return found
