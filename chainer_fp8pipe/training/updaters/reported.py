"""Means of what micro-batches and ranks report.

Chainer takes anything for a report.  Numbers and arrays have a mean, and so
have pairs of a number and its weight, which ``DictSummary`` knows; of anything
else (None, a text, arrays of several shapes) the last one counts, as it would
if the batch had not been divided.
"""
from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ...mpi.waiting import wait_until


class _Entry(NamedTuple):
    """What is known of a name.

    Attributes:
        kind: ``'number'``, ``'array'``, ``'pair'`` or ``'other'``.
        total: The weighted sum of the first three, in float64; the other.
        weight: The sum of the weights.
        dtype: Of an array's mean.
    """

    kind: str
    total: Any
    weight: float
    dtype: str = ''

    def then(self, later: _Entry) -> _Entry:
        """This and what was reported later."""
        if self.kind != later.kind or self.kind == 'other' or (
                numpy.shape(self.total) != numpy.shape(later.total)):
            return later
        return later._replace(total=self.total + later.total,
                              weight=self.weight + later.weight)

    def mean(self) -> Any:
        if self.kind == 'other':
            return self.total
        if self.kind == 'array':
            return (self.total / (self.weight or 1.0)).astype(self.dtype)
        mean = self.total / self.weight if self.weight else 0.0
        return (mean, self.weight) if self.kind == 'pair' else mean


class Reported:
    """What a rank has to say to the means, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, value: Any, weight: float) -> None:
        """Adds a value that was reported, which counts so much."""
        self._add(name, _entry(value, weight))

    def add_sum(self, name: str, total: float, weight: float) -> None:
        """Adds a weighted sum of numbers, and the sum of their weights."""
        self._add(name, _Entry('number', total, weight))

    def _add(self, name: str, entry: _Entry) -> None:
        known = self._entries.get(name)
        self._entries[name] = known.then(entry) if known else entry

    def names(self) -> list[str]:
        return list(self._entries)

    def number(self, name: str) -> tuple[float, float, bool]:
        """Sum, weight and whether there is one, of a number."""
        entry = self._entries.get(name)
        if entry is None or entry.kind != 'number':
            return 0.0, 0.0, False
        return entry.total, entry.weight, True

    def others(self) -> dict[str, _Entry]:
        """All that are no numbers."""
        return {name: entry for name, entry in self._entries.items()
                if entry.kind != 'number'}


def share_means(comm: MPI.Comm, known: list[str], mine: Reported,
                failed: bool = False) -> dict[str, Any] | None:
    """Means over all ranks, the same on all; None if one of them has failed.

    One all-reduce, once the ranks know each other's names.

    Args:
        comm: The ranks.
        known: The names so far, the same on all ranks; names are added.
        mine: What this rank reports; not counted if it has ``failed``.
        failed: This rank cannot go on.
    """
    others = {} if failed else mine.others()
    named = [] if failed else mine.names()
    found = _summed(comm, [failed, not set(named) <= set(known),
                           bool(others)], known, mine)
    if found[0, 0]:
        return None
    if found[0, 1]:     # once for a name
        known[:] = dict.fromkeys(
            name for names in comm.allgather([*known, *named])
            for name in names)
        found = _summed(comm, [0, 0, bool(others)], known, mine)
    means = {name: (total / weight if weight else 0.0)
             for name, (total, weight, ranks)
             in zip(known, found[1:].tolist(), strict=True) if ranks}
    if found[0, 2]:     # few models report such things
        everyone: dict[str, _Entry] = {}
        for one in comm.allgather(others):
            for name, entry in one.items():
                before = everyone.get(name)
                everyone[name] = before.then(entry) if before else entry
        means.update({name: entry.mean()
                      for name, entry in everyone.items()})
    return means


def _summed(comm: MPI.Comm, flags: list[Any], known: list[str],
            mine: Reported) -> numpy.ndarray:
    """Sums over all ranks: a row of flags, and one for each known name."""
    numbers = numpy.array(
        [flags, *([0.0] * 3 if flags[0] else mine.number(name)
                  for name in known)], numpy.float64)
    # MPI's own wait would keep the core from other ranks.
    wait_until(comm.Iallreduce(MPI.IN_PLACE, numbers).Test)
    return numbers


def _entry(value: Any, weight: float) -> _Entry:
    if (isinstance(value, tuple) and len(value) == 2
            and all(map(_is_number, value))):
        number, own = (float(_host(item)) for item in value)
        return _Entry('pair', own * number if own else 0.0, own)
    array = _host(value)
    if _is_number(array):
        return _Entry('number', weight * float(array) if weight else 0.0,
                      weight)
    if isinstance(array, numpy.ndarray) and array.dtype.kind in 'biuf':
        mean: Any = array.dtype if array.dtype.kind == 'f' else numpy.float64
        total = array.astype(numpy.float64)
        if not weight:          # whatever it is, not a number perhaps
            total[...] = 0
        return _Entry('array', weight * total, weight, numpy.dtype(mean).str)
    pickle.dumps(array)     # the other ranks are given it
    return _Entry('other', array, 1.0)


def _host(value: Any) -> Any:
    """The NumPy array of an array or variable; else the value."""
    if isinstance(value, chainer.Variable):
        value = value.array
    return (chainer.backends.cuda.to_cpu(value)
            if isinstance(value, chainer.get_array_types()) else value)


def _is_number(value: Any) -> bool:
    value = getattr(value, 'array', value)      # of a variable
    return isinstance(value, (bool, int, float)) or (
        getattr(value, 'ndim', -1) == 0
        and getattr(getattr(value, 'dtype', None), 'kind', '') in 'biuf')
