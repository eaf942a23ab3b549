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
    figures = {pair: _of_others(speeds, pair) for pair in speeds}
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


def _of_others(speeds: dict[_Pair, list[float]], pair: _Pair) -> float:
    """A link's speed, of that of the faster others."""
    others = numpy.array([found for other, found in speeds.items()
                          if other != pair])
    bandwidth, latency = speeds[pair]
    fast = bandwidth / float(numpy.quantile(others[:, 0], 0.9))
    usual = float(numpy.quantile(others[:, 1], 0.1))
    if fast >= _SLOW and latency > max(_LATE * usual, usual + _LATER):
        return usual / latency
    return fast
