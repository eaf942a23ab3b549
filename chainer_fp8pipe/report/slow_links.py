"""Which links between hosts are slow, and in which direction."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy

from .records.run_record import LinkReading

#: Readings of a direction that are looked at, the newest.
_RECENT = 8
#: A link is slow from so much of others' bandwidth on; where most links of a
#: host are, a part of that is enough for the others.
_SLOW, _ALSO = 0.6, 0.75
#: Or with so many times their latency, if that is so many seconds more: ranks
#: that share cores answer up to 0.3 ms late, and no link is the cause.
_LATE, _LATER = 3.0, 400e-6

BOTH, OUT, IN = 'both', 'out', 'in'
_Pair = tuple[int, int]


class SlowLink(NamedTuple):
    """A link, or all of a host's.

    Attributes:
        ranks: Of the host; of a link two, of one direction first the one
            that sends.
        way: ``'both'`` directions, or, seen from the first rank, ``'out'``
            or ``'in'``.
        figure: Of other links' speed.
        bandwidth: Bytes per second, upper quartile, of the slower direction.
        latency: Seconds, the least.
    """

    ranks: tuple[int, ...]
    way: str
    figure: float
    bandwidth: float
    latency: float


def slow_links(readings: Iterable[LinkReading]) -> Iterator[SlowLink]:
    """Hosts whose links are all slow, then single links, by their ranks.

    Nothing if there are fewer than three links, of which none is usual.

    Args:
        readings: Of links between hosts, in one start, by time.
    """
    found: dict[_Pair, list[tuple[float, float]]] = defaultdict(list)
    for link in readings:
        found[link.source, link.target].append((link.bandwidth, link.latency))
    speeds = {pair: _speed(some[-_RECENT:]) for pair, some in found.items()}
    if len({frozenset(pair) for pair in speeds}) < 3:
        return
    figures = _of_others(speeds)
    left = {pair for pair, figure in figures.items() if figure < _SLOW}
    for rank in sorted({rank for pair in left for rank in pair}):
        ways = {OUT: [pair for pair in speeds if pair[0] == rank],
                IN: [pair for pair in speeds if pair[1] == rank]}
        slow = [way for way, pairs in ways.items()
                if _are_slow([figures[pair] for pair in pairs])]
        if slow:
            pairs = [pair for way in slow for pair in ways[way]]
            left -= {*pairs}
            yield _link((rank,), BOTH if len(slow) == 2 else slow[0], pairs,
                        figures, speeds)
    for one, other in sorted(left):
        back = (other, one)
        if back not in left:
            yield _link((one, other), BOTH if back not in speeds else OUT,
                        [(one, other)], figures, speeds)
        elif one < other:
            yield _link((one, other), BOTH, [(one, other), back], figures,
                        speeds)


def _speed(readings: Sequence[tuple[float, float]]) -> list[float]:
    """Bandwidth and latency; what else ranks' machines do makes both worse."""
    bandwidths, latencies = zip(*readings, strict=True)
    return [float(numpy.quantile(bandwidths, 0.75)), min(latencies)]


def _link(ranks: tuple[int, ...], way: str, pairs: Sequence[_Pair],
          figures: dict[_Pair, float], speeds: dict[_Pair, list[float]]
          ) -> SlowLink:
    slowest = min(pairs, key=lambda pair: figures[pair])
    return SlowLink(ranks, way, float(numpy.median(
        [figures[pair] for pair in pairs])), *speeds[slowest])


def _are_slow(figures: Sequence[float]) -> bool:
    return (len(figures) > 1 and max(figures) < _ALSO
            and float(numpy.median(figures)) < _SLOW)


def _of_others(speeds: dict[_Pair, list[float]]) -> dict[_Pair, float]:
    """The speed of each link, of that of the faster others."""
    bandwidths, latencies = numpy.array([*speeds.values()]).T
    return {pair: _figure(*speed) for pair, *speed in zip(
        speeds, bandwidths.tolist(), latencies.tolist(),
        _quantiles_of_others(bandwidths, 0.9),
        _quantiles_of_others(latencies, 0.1), strict=True)}


def _figure(bandwidth: float, latency: float, most: float, least: float
            ) -> float:
    """A link's speed beside a usual bandwidth and a usual latency."""
    if (bandwidth >= _SLOW * most
            and latency > max(_LATE * least, least + _LATER)):
        return least / latency
    return bandwidth / most


def _quantiles_of_others(values: numpy.ndarray, share: float) -> list[float]:
    """For each of at least two values a quantile of all the others.

    It lies between two neighbours, by place, of those that are left.  So it
    only matters whether the missing one was before, between or behind them,
    and there are three quantiles at most.
    """
    order = numpy.argsort(values)
    places = numpy.empty_like(order)
    places[order] = numpy.arange(len(values))
    before = int((len(values) - 2) * share)
    places = places.clip(before, before + 2)
    found = {place: float(numpy.quantile(
        numpy.delete(values, order[place]), share))
        for place in {*places.tolist()}}
    return [found[place] for place in places.tolist()]
