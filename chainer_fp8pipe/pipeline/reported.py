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
        kind: ``'number'``, ``'pair'``, ``'other'``, or the dtype of an
            array's mean.
        total: The weighted sum in float64; the other.
        weight: The sum of the weights.
    """

    kind: str
    total: Any
    weight: float


#: What a rank has to say to the means, by name.
Reports = dict[str, Report]


def add(reports: Reports, name: str, new: Report) -> None:
    """Adds a later report of a name to the earlier ones."""
    old = reports.get(name)
    if old and old.kind == new.kind != 'other' and (
            numpy.shape(old.total) == numpy.shape(new.total)):
        new = Report(new.kind, old.total + new.total,
                     old.weight + new.weight)
    reports[name] = new


def means(everyone: Iterable[Reports]) -> dict[str, Any]:
    """Means over ranks, in their order."""
    found: Reports = {}
    for reports in everyone:
        for name, report in reports.items():
            add(found, name, report)
    return {name: _mean(*report) for name, report in found.items()}


def _mean(kind: str, total: Any, weight: float) -> Any:
    if kind == 'other':
        return total
    mean = total / (weight or 1.0)
    return (mean if kind == 'number' else (mean, weight) if kind == 'pair'
            else mean.astype(kind))


def report_of(value: Any, weight: float) -> Report:
    """The report of a value with a weight in the mean."""
    value, kind = _host(value), 'number'
    if isinstance(value, tuple) and len(value) == 2 and all(
            _is_number(_host(item)) for item in value):
        value, weight = (float(_host(item)) for item in value)
        kind = 'pair'
    # What counts nothing may be not a number.
    if _is_number(value):
        return Report(kind, weight * float(value) if weight else 0.0, weight)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in 'biuf':
        return Report(
            value.dtype.str if value.dtype.kind == 'f' else 'f8',
            weight * value.astype(numpy.float64) if weight
            else numpy.zeros(value.shape), weight)
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
