"""What the rates of messages say about ports, pairs, and what hosts share.

Pure functions of what was measured: on all ranks the same result.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import NamedTuple

from ...planning.job.job_profile import Figure
from .link_rounds import Message

#: Of one round: by message, its bytes per second in each repeat.
Rates = Mapping[Message, Sequence[float]]

#: Half of the distance between quartiles to the standard error of a median of
#: one value, if values are normal: sqrt(pi / 2) / 0.6745.
_OF_MEDIAN = 1.858
_SLOW = 0.5             # of the median: what is slower than this is named
_SHARED = 0.9           # of the rate alone: less in company is for a reason
_HALF_DUPLEX = 0.65     # of the rate in one direction, with both busy


class Port(NamedTuple):
    """Bytes per second that a rank sends, and receives, in each repeat."""

    out: Sequence[float]
    into: Sequence[float]

    @property
    def slower(self) -> Sequence[float]:
        """Those of the slower direction."""
        return min(self, key=statistics.median)


def rates_of(size: int, seconds: Iterable[Sequence[float]]) -> list[float]:
    """Bytes per second in each repeat, by the times of two loads.

    What a link passes at once when it was idle, and how long a message takes
    to begin, are in both times, and not in their difference.

    Args:
        size: Bytes of the smaller load; the larger one has three times as
            many.
        seconds: In each repeat, of the smaller load and of the larger one.
    """
    shorts, longs = zip(*seconds, strict=True)
    short = statistics.median(shorts)
    # The difference is two thirds of the longer time, or more, but for the
    # beginning.  If it is much less, all smaller loads were disturbed.
    return [2 * size / max(long - short, long / 2) for long in longs]


def ports(rounds: Iterable[Rates]) -> dict[int, Port]:
    """Every rank's rates, by the round in which they were highest.

    In each round the rank has another peer; a slow one slows it down in that
    round only.
    """
    sides: tuple[dict[int, Sequence[float]], ...] = ({}, {})
    for rates in rounds:
        for message, values in rates.items():
            for found, rank in zip(sides, message, strict=True):
                found[rank] = max(found.get(rank, values), values,
                                  key=statistics.median)
    out, into = sides
    return {rank: Port(out[rank], into[rank])
            for rank in sorted(out) if rank in into}


def slowest(found: Collection[Sequence[float]]) -> Figure:
    """The least of several rates; or what all have in common.

    The least of many equal rates is less than each of them by chance.  If
    chance explains the least one, the mean of all is the better estimate.

    Args:
        found: Of each rate the values in all repeats, which are equally many.
    """
    figures = sorted(map(Figure.of, found))
    median, spread = map(statistics.median, zip(*figures, strict=True))
    repeats = max(map(len, found))
    # By how much the least of n medians of normal values is below them all.
    error = _OF_MEDIAN * spread / math.sqrt(repeats)
    chance = error * math.sqrt(2 * math.log(len(figures)))
    if figures[0].value < median * (1 - chance):
        return figures[0]
    # Harmonic: seconds are what is measured.
    return Figure.of(map(statistics.harmonic_mean, zip(*found, strict=True)))


def messages_of(rounds: Iterable[Rates]) -> list[Sequence[float]]:
    """The values of every message: on a torus, of every link."""
    return [values for rates in rounds for values in rates.values()]


def fastest_message(rates: Rates) -> Message:
    """The message with the highest rate: a slow port does not limit it."""
    return max(rates, key=lambda message: statistics.median(rates[message]))


def trunk(together: Sequence[Rates], alone: Sequence[Rates]
          ) -> Figure | None:
    """What all messages get together, if that is less than their ports'.

    Args:
        together: Of rounds in which all hosts send.
        alone: Of each of these rounds, one message while others were silent.

    Returns:
        Bytes per second of all messages in the slowest such round; None if a
        message is as fast in company as alone, up to a tenth.
    """
    totals = []
    for rates, single in zip(together, alone, strict=True):
        message = next(message for message in single if message in rates)
        company = Figure.of(rates[message])
        # What disturbs a repeat or two is not shared by all.
        if (company.value * (1 + company.spread)
                < _SHARED * statistics.median(single[message])):
            totals.append(Figure.of(
                map(sum, zip(*rates.values(), strict=True))))
    return min(totals, key=_value) if totals else None


def burst(rate: float, size: int, short: float, long: float) -> float:
    """Bytes that a link passes at once after it was idle: a token bucket.

    Args:
        rate: Bytes per second that it passes later.
        size: Bytes of a load.
        short: Seconds of a short message after the link was idle.
        long: Seconds of the load after the link was idle.

    Returns:
        Bytes; up to ``size``, where the burst is larger.  0 if they are no
        more than the link passes while the short message takes, which is
        what cannot be told from none.
    """
    found = size - rate * (long - short)
    return found if found > rate * short else 0.0


def slow_ports(found: Mapping[int, Port], name: Callable[[int], str]
               ) -> tuple[str, ...]:
    """Sentences on hosts whose ports are slower than those of others.

    Args:
        found: Of one rank of each host.
        name: Names the host of a rank.
    """
    values = {rank: statistics.median(port.slower)
              for rank, port in found.items()}
    median, most = statistics.median(values.values()), max(values.values())
    slow = [rank for rank in values if values[rank] < _SLOW * median]
    typical = f'the median host {said_rate(median)}'
    if not slow and min(values.values()) < _SLOW * most:
        slow = [rank for rank in values if values[rank] < _SLOW * most]
        typical = f'the fastest one {said_rate(most)}'
    return tuple(
        f'{name(rank)} sends {_said_median(found[rank].out)} and receives '
        f'{_said_median(found[rank].into)}, {typical}: check its cable, its '
        'port, and what else uses them' for rank in slow)


def slow_pairs(rounds: Iterable[Rates], found: Mapping[int, Port],
               name: Callable[[int], str]) -> tuple[str, ...]:
    """Sentences on messages that are slower than the ports at both ends.

    Args:
        rounds: Messages between these ports.
        found: The ports.
        name: Names the host of a rank.
    """
    said = []
    for rates in rounds:
        for (source, target), values in sorted(rates.items()):
            rate = statistics.median(values)
            able = min(map(statistics.median,
                           (found[source].out, found[target].into)))
            if rate < _SLOW * able:
                said.append(_pair(source, target, rate, name)
                            + f', though their ports pass {said_rate(able)}: '
                            'check the way from one to the other')
    return tuple(dict.fromkeys(said))


def slow_links(rounds: Iterable[Rates], name: Callable[[int], str]
               ) -> tuple[str, ...]:
    """Sentences on messages that are slower than others.

    Args:
        rounds: Messages each of which has a link of its own.
        name: Names the host of a rank.
    """
    values = {message: statistics.median(found) for rates in rounds
              for message, found in rates.items()}
    median = statistics.median(values.values())
    return tuple(
        _pair(*message, values[message], name) + f', the median link passes '
        f'{said_rate(median)}: check this one'
        for message in sorted(values) if values[message] < _SLOW * median)


def half_duplex(one_way: Rates, both_ways: Iterable[Rates]
                ) -> tuple[str, ...]:
    """A sentence if links are slower while both directions are busy."""
    single = statistics.median(
        statistics.median(values) for values in one_way.values())
    both = statistics.median(
        statistics.median(values) for rates in both_ways
        for values in rates.values())
    if both >= _HALF_DUPLEX * single:
        return ()
    return (f'links are half duplex, or nearly: {said_rate(single)} in one '
            f'direction alone, {said_rate(both)} in each while both are '
            "busy: check the ports' settings",)


def by_host(rounds: Iterable[Rates], hosts: Sequence[int]
            ) -> list[list[float]]:
    """The rates between two ranks of a host in each repeat, of each host.

    Args:
        rounds: Messages inside hosts.
        hosts: For each rank, the number of its host.
    """
    found: dict[int, list[Sequence[float]]] = {}
    for rates in rounds:
        for (source, _), values in rates.items():
            found.setdefault(hosts[source], []).append(values)
    return [[statistics.harmonic_mean(repeat)
             for repeat in zip(*values, strict=True)]
            for values in found.values()]


def said_sharing(alone: float, together: float) -> tuple[str, ...]:
    """A sentence if ranks of a host slow each other down much.

    Args:
        alone: Bytes per second between two ranks while others are silent.
        together: Bytes per second between any two while all send.
    """
    if together >= _SLOW * alone:
        return ()
    return (f'two ranks of a host send {said_rate(alone)} to each other, all '
            f'ranks of a host at once {said_rate(together)} each',)


def said_trunk(trunk: float, alone: float) -> str:
    """A sentence on what hosts share.

    Args:
        trunk: Bytes per second of all hosts.
        alone: Bytes per second of a pair in each direction.
    """
    return (f'hosts share {said_rate(trunk)} in all, though a pair alone gets '
            f'{said_rate(alone)} in each direction: check the switch, or the '
            'link that they share')


def said_rate(rate: float) -> str:
    """Three digits, as in ``'59.7 MB/s'``."""
    for unit, size in (('GB', 1e9), ('MB', 1e6)):
        if rate >= size:
            return f'{rate / size:.3g} {unit}/s'
    return f'{rate / 1e3:.3g} kB/s'


def _said_median(values: Sequence[float]) -> str:
    return said_rate(statistics.median(values))


def _pair(source: int, target: int, rate: float,
          name: Callable[[int], str]) -> str:
    return f'{name(source)} sends {name(target)} {said_rate(rate)}'


def _value(figure: Figure) -> float:
    return figure.value
