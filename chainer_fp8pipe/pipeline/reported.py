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
    """The reports of one name, added up."""

    #: ``'number'``, ``'pair'``, ``'other'``, or the dtype of an array's mean.
    kind: str
    total: Any          # the weighted sum in float64; the other
    weight: float       # the sum of the weights


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
    kind = 'number'
    if isinstance(value, tuple) and len(value) == 2 and all(
            _array(one).ndim == 0 and _array(one).dtype.kind in 'biuf'
            for one in value):
        value, weight, kind = value[0], float(_array(value[1])), 'pair'
    array = _array(value)
    if array.dtype.kind not in 'biuf':
        pickle.dumps(value)     # the other ranks are given it
        return Report('other', value, 1.0)
    # What counts nothing may be not a number.
    total = (weight * array.astype(float) if weight
             else numpy.zeros(array.shape))
    if array.ndim == 0:
        return Report(kind, float(total), weight)
    return Report(array.dtype.str if array.dtype.kind == 'f' else 'f8', total,
                  weight)


def _array(value: Any) -> numpy.ndarray:
    """A NumPy array of anything; of dtype object if it is no number."""
    value = getattr(value, 'array', value)      # of a variable
    if isinstance(value, chainer.get_array_types()):
        return chainer.backends.cuda.to_cpu(value)
    return numpy.array(value) if isinstance(
        value, (bool, int, float, numpy.generic)) else numpy.empty((), object)
