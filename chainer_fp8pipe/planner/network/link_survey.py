"""Measures messages in rounds, with repeats that a budget allows.

Every rank learns what every other one measured, and so decides alike.
"""
from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy

from ...planning.job.job_profile import Figure
from .link_findings import Rates, burst, rates_of
from .link_rounds import Round, ends
from .peers import Peers
from .timed_messages import (
    Load,
    Work,
    answered_stream,
    nap_work,
    ping,
    stream,
    work,
)

_LEAST, _MOST = 1 << 16, 1 << 30    # bytes of a load
_BURST = 1 << 18        # bytes of the first load by which a burst is told
_ENOUGH = 20e-3         # seconds of a load: clocks and cores disturb by less
_TOO_LONG = 0.25        # seconds of the slowest message of a load
_TRIES = 3              # of a load that takes too long
_MANY_BURSTS = 2        # that a load has at least
_REPEATS = 7
_PINGS = 15             # of which the fastest counts
_SMALL = Load(1 << 10, 1)       # less than what links pass at once
_FEW, _MANY, _LONG = Load(1, 4), Load(1, 64), Load(3 << 13, 4)
_LONGEST_NAP = 20e-3    # seconds
# What messages take at least of the processor, while a rank sends and naps.
_LEAST_SHARE = 0.1
# Idleness after which a link passes at once what it can.
_IDLE = 60e-3           # seconds, where that is measured
_LEAST_IDLE = 20e-3     # seconds, elsewhere


class LinkSurvey:
    """What ranks do at the same time to measure links.

    All ranks call the same methods with the same arguments, and get the same
    results.  ``part`` is a part of the budget; ``members`` are the ranks that
    have a part in the rounds, even if in none of them.

    Args:
        peers: All ranks.
        budget: Seconds.
    """

    def __init__(self, peers: Peers, budget: float) -> None:
        self._peers, self._budget = peers, budget
        self._started, self._now = time.perf_counter(), 0.0
        self._idle, self._burst = _LEAST_IDLE, 0.0

    def costs(self, members: Sequence[int], part: float
              ) -> tuple[Figure, Figure]:
        """Seconds that a message, and a byte of it, keep a rank busy."""
        nap = 0.0
        if self._is_in(members):
            nap = statistics.median(
                work(self._peers, members, _LONG, 0.0).seconds
                for _ in range(3))
        nap = min(2 * float(self._share([nap]).max()) + 3e-4, _LONGEST_NAP)

        def measure() -> list[float]:
            if not self._is_in(members):
                return [math.nan] * 2
            few, many, long = (work(self._peers, members, load, nap)
                               for load in (_FEW, _MANY, _LONG))
            return _costs_of(few, many, long, nap_work(self._peers, nap))
        found = self._repeat(part, measure, 2 * _REPEATS)
        message, byte = numpy.nanmedian(found, 1).T
        return Figure.of(message.tolist()), Figure.of(byte.tolist())

    def latency(self, rounds: Sequence[Round], members: Sequence[int],
                part: float, cost: Figure) -> Figure:
        """Seconds of a short message, less what the message costs ranks."""
        def measure() -> list[float]:
            return [ping(self._peers, members, messages, _PINGS)
                    if self._is_in(members) else math.nan
                    for messages in rounds]
        measure()               # connections are made by the first messages
        medians = [float(numpy.nanmedian(one))
                   for one in self._repeat(part, measure)]
        # A message is on its way for some of the time, however short.
        return Figure.of(max(median - 2 * cost.value, median / 10)
                         for median in medians)

    def bursts(self, messages: Round, members: Sequence[int], part: float
               ) -> tuple[Rates, float]:
        """Rates in one direction, and the bytes that idle links pass at once.

        Every member has one message at most.
        """
        def timed(load: Load, idle: float = _IDLE) -> list[float]:
            if not self._is_in(members):
                return [math.nan]
            time.sleep(idle)
            return (answered_stream(self._peers, members, messages, load)
                    or [math.nan])
        load = self._load(timed)
        found = self._repeat(part / 2, lambda: [
            seconds for one in (load, load.times(3))
            for seconds in timed(one, _LEAST_IDLE)])
        rates = {message: rates_of(load.size, found[:, message[0]].tolist())
                 for message in messages}
        # By the fastest of each load: nothing else had the core.
        best = {source: rates_of(load.size,
                                 [found[:, source].min(0).tolist()])[0]
                for source, _ in messages}

        def burst_by(size: int, repeats: int) -> float:
            found = self._repeat(part / 2, lambda: [
                *timed(_SMALL, _LEAST_IDLE), *timed(Load.of(size))], repeats)
            short, long = numpy.nanmin(found[..., 0]), found[..., 1].min(0)
            return statistics.median(
                burst(best[source], Load.of(size).size, float(short),
                      float(long[source])) for source, _ in messages)
        size = _BURST
        while _MANY_BURSTS * burst_by(size, 2) > size and size < _MOST:
            size *= 2
        self._burst = burst_by(size, 2 * _REPEATS)
        self._idle = min(max(
            1.5 * self._burst / statistics.median(best.values()),
            _LEAST_IDLE), _IDLE)
        return rates, self._burst

    def rates(self, rounds: Sequence[Round], members: Sequence[int],
              part: float, alert: float) -> list[Rates]:
        """Bytes per second of each message in each round.

        ``alert`` is as in :func:`~.timed_messages.stream`.
        """
        slots = max(len(ends(messages, rank)[1])
                    for messages in rounds for rank in members)

        def timed(messages: Round, load: Load) -> list[float]:
            seconds: list[float] = []
            if self._is_in(members):
                time.sleep(self._idle)
                seconds = stream(self._peers, members, messages, load, alert)
            return seconds + [math.nan] * (slots - len(seconds))
        load = self._load(lambda load: timed(rounds[0], load),
                          _MANY_BURSTS * self._burst)
        found = self._repeat(part, lambda: [
            seconds for messages in rounds for one in (load, load.times(3))
            for seconds in timed(messages, one)])
        table = found.reshape(*found.shape[:2], len(rounds), 2, slots)
        return [{(source, target): rates_of(
                    load.size, table[:, target, number, :, slot].tolist())
                 for target in members
                 for slot, source in enumerate(ends(messages, target)[1])}
                for number, messages in enumerate(rounds)]

    def show(self, what: str) -> None:
        """A line of progress, where somebody can see it; '': takes it away."""
        if self._peers.rank == 0 and sys.stderr.isatty():
            line = (f'measuring the network: {what} ({self._now:.0f} s of '
                    f'about {self._budget:.0f})' if what else '')
            sys.stderr.write(f'\r{line:<70}' + ('' if what else '\r'))
            sys.stderr.flush()

    def _load(self, timed: Callable[[Load], list[float]],
              least: float = 0.0) -> Load:
        """The smallest load, by powers of two, that takes long enough."""
        load = Load.of(_LEAST)
        while load.size < _MOST:
            seconds = self._share(timed(load))
            for _ in range(_TRIES):
                if (numpy.nanmedian(seconds) >= _ENOUGH
                        or numpy.nanmax(seconds) < _TOO_LONG):
                    break
                # A single lost packet stops TCP for as long.
                seconds = numpy.minimum(seconds, self._share(timed(load)))
            if load.size >= least and (
                    numpy.nanmedian(seconds) >= _ENOUGH
                    or numpy.nanmax(seconds) >= _TOO_LONG):
                break
            load = Load.of(2 * load.size)
        return load

    def _repeat(self, part: float, measure: Callable[[], list[float]],
                most: int = _REPEATS) -> numpy.ndarray:
        """Repeats, until a part of the budget is used up.

        Returns:
            float64 of shape (repeats, ranks, numbers that a rank measures).
        """
        end = self._now + part * self._budget
        found: list[numpy.ndarray] = []
        last = 0.0
        while not found or (len(found) < most and self._now + last < end):
            before = self._now
            found.append(self._share(measure()))
            last = self._now - before
        return numpy.array(found)

    def _share(self, numbers: Sequence[float]) -> numpy.ndarray:
        """All ranks' numbers, on all ranks, which so agree on the time."""
        everyone = self._peers.gather(numpy.array(
            [time.perf_counter() - self._started, *numbers]))
        self._now = float(everyone[:, 0].max())
        return everyone[:, 1:]

    def _is_in(self, members: Sequence[int]) -> bool:
        return self._peers.rank in members


def _costs_of(few: Work, many: Work, long: Work, nap: float) -> list[float]:
    """Seconds of a message, and of a byte of it.

    Args:
        few, many, long: What their loads took.
        nap: Seconds that a nap takes by itself.
    """
    # Each message has two ends here: one that leaves, one that comes.
    ends, bytes_ = 2 * (_MANY.frames - _FEW.frames), 2 * _LONG.size
    # A nap that was disturbed looks longer than what is to be without it.
    return [max((_busy(many, nap) - _busy(few, nap)) / ends,
                _LEAST_SHARE * many.busy / (2 * _MANY.frames)),
            max((_busy(long, nap) - _busy(few, nap)) / bytes_, 0.0)]


def _busy(done: Work, nap: float) -> float:
    """Seconds of messages alone; a nap takes ``nap`` seconds by itself."""
    return done.busy - done.naps * nap
