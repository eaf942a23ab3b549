"""Times several kinds of work in turns, at one pace.

A machine that others use, or whose clock changes, can be twice as slow some
seconds later.  Kinds of work that are timed one after the other would have
ratios by chance; in turns, all meet the same moments.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy

#: Rounds, and seconds after which there are no more.
_FEWEST, _MOST = 3, 20
_ENOUGH = 4.0

#: Does a piece of work; the seconds of its parts.
Work = Callable[[], Sequence[float]]


def in_turns(works: Sequence[Work]) -> list[numpy.ndarray]:
    """Seconds of each kind of work, in rounds.

    Args:
        works: Each returns equally many values each time.  The first one
            tells the machine's pace, by the sum of its values.

    Returns:
        For each kind float64[rounds, values], at the pace that the first kind
        has in the median.
    """
    for work in works:              # gets memory, and imports
        work()
    found: list[list[Sequence[float]]] = [[] for _ in works]
    begin = time.perf_counter()
    while len(found[0]) < _FEWEST or (
            len(found[0]) < _MOST
            and time.perf_counter() - begin < _ENOUGH):
        for work, of in zip(works, found, strict=True):
            of.append(work())
    found[0].append(works[0]())     # so that all rounds have one on each side
    return at_one_pace(found)


def at_one_pace(found: Sequence[Sequence[Sequence[float]]]
                ) -> list[numpy.ndarray]:
    """Divides rounds by the pace of each.

    Args:
        found: ``found[kind][round][value]``; of the first kind a round more.

    Returns:
        As :func:`in_turns`; the first kind as it was.
    """
    first = numpy.asarray(found[0], numpy.float64)
    sums = first.sum(axis=1)
    pace = (sums[:-1] + sums[1:]) / 2 / statistics.median(sums)
    return [first, *(numpy.asarray(of, numpy.float64) / pace[:, None]
                     for of in found[1:])]
