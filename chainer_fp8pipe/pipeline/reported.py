"""Means of what a model reports, over micro-batches and ranks."""
# Chainer takes anything for a report.  Numbers and arrays have a mean, and so
# have pairs of a number and its weight, which `DictSummary` knows; of anything
# else (None, a text, arrays of several shapes) the last one counts, as it
# would if the batch had not been divided.
from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer
import numpy


class Report(NamedTuple):
    """The reports of one name, added up.

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

    def mean(self) -> Any:
        if self.kind == 'other':
            return self.total
        mean = self.total / (self.weight or 1.0)
        if self.kind == 'array':
            return mean.astype(self.dtype)
        return (mean, self.weight) if self.kind == 'pair' else mean


#: What a rank has to say to the means, by name.
Reports = dict[str, Report]


def add(reports: Reports, name: str, new: Report) -> None:
    """Adds a later report of a name to the earlier ones."""
    old = reports.get(name)
    if old and old.kind == new.kind != 'other' and (
            numpy.shape(old.total) == numpy.shape(new.total)):
        new = new._replace(total=old.total + new.total,
                           weight=old.weight + new.weight)
    reports[name] = new


def means(everyone: Iterable[Reports]) -> dict[str, Any]:
    """Means over ranks, in their order."""
    found: Reports = {}
    for reports in everyone:
        for name, report in reports.items():
            add(found, name, report)
    return {name: report.mean() for name, report in found.items()}


def report_of(value: Any, weight: float) -> Report:
    """The report of a value with a weight in the mean."""
    if isinstance(value, tuple) and len(value) == 2 and all(
            _is_number(_host(item)) for item in value):
        number, own = (float(_host(item)) for item in value)
        return Report('pair', own * number if own else 0.0, own)
    value = _host(value)
    if _is_number(value):
        # What counts nothing may be not a number.
        return Report('number', weight * float(value) if weight else 0.0,
                      weight)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in 'biuf':
        total = value.astype(numpy.float64) if weight else numpy.zeros(
            value.shape)
        dtype = value.dtype.str if value.dtype.kind == 'f' else 'f8'
        return Report('array', weight * total, weight, dtype)
    pickle.dumps(value)     # the other ranks are given it
    return Report('other', value, 1.0)


def _host(value: Any) -> Any:
    """The NumPy array of an array or variable; else the value."""
    if isinstance(value, chainer.Variable):
        value = value.array
    return (chainer.backends.cuda.to_cpu(value)
            if isinstance(value, chainer.get_array_types()) else value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        getattr(value, 'ndim', -1) == 0
        and getattr(getattr(value, 'dtype', None), 'kind', '') in 'biuf')
